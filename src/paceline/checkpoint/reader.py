"""A checkpoint read back: nothing leaves here that was not compared with its hash."""

from __future__ import annotations

import json
import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import shard_file
from paceline.checkpoint.hashing import Hashing
from paceline.checkpoint.manifest import Chunk, Entry, Manifest, OtherFormat, Rejected, chunk_bytes
from paceline.checkpoint.planner import ReadItem, narrow, plan_load
from paceline.errors import CheckpointError
from paceline.run.folder import ROOT, RunFolder

_Spans = dict[tuple[str, int], list[ReadItem]]


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, whose manifest was read and whose files have the sizes it says."""

    folder: Path
    manifest: Manifest


def damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        "damaged",
        f"The checkpoint {folder} is damaged: {what}.",
        why="it is not what was written: a disk, a copy or a program has changed it",
        fix=f"take an older one; paceline checkpoint verify {folder.parent} shows which are good",
    )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the manifest and looks at every file's size."""
    if not (folder / manifests.NAME).exists():
        if folder.is_dir() and folder.name.startswith("step-"):
            raise damaged(folder, f"there is no {manifests.NAME} in it")
        raise CheckpointError(
            "missing",
            f"There is no checkpoint at {folder}.",
            fix=f"give the folder that holds {manifests.NAME}, e.g. {RunFolder(ROOT / 'gpt').checkpoints}/step-000120",
        )
    try:
        limit = manifests.longest(sum(path.lstat().st_size for path in folder.glob("rank-*.safetensors")))
        body, digest = (_small_file(folder / name, limit) for name in (manifests.NAME, manifests.DIGEST))
        manifest = manifests.decode(body, digest)
        for name, file in manifest.files.items():
            with _opened(folder / name) as descriptor:
                size = os.fstat(descriptor).st_size
            if size != file.bytes:
                raise Rejected(f"{name} has {size} bytes instead of {file.bytes}")
    except OtherFormat as error:
        raise CheckpointError(
            "other-format",
            f"The checkpoint {folder} can't be read: {error}.",
            fix="load it with the version that wrote it",
        ) from None
    except (OSError, Rejected) as error:
        raise damaged(folder, _reason(error)) from None
    return Checkpoint(folder, manifest)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename).name if error.filename else 'a file'}: {error.strerror or error}"
    return str(error)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A plain file, never what a link points to, nor a pipe that nobody writes to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Rejected(f"{path.name} is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _small_file(path: Path, limit: int) -> bytes:
    with _opened(path) as descriptor:
        if os.fstat(descriptor).st_size > limit:
            raise Rejected(f"{path.name} has more than {limit} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()


def read_tensors(checkpoint: Checkpoint, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each wanted tensor, on the CPU, in the dtype in which it was saved.

    `wanted` are tensors (also on `meta`, also DTensors) that have the names and shapes that the checkpoint has.
    """
    manifest = checkpoint.manifest
    spans: _Spans = defaultdict(list)
    for read in plan_load(wanted, manifest):
        spans[read.name, read.chunk].append(read)
    parts: dict[str, Tensor] = {}
    with _Reader(checkpoint.folder, manifest.block) as reader:
        reader.check_headers(manifest)
        for name, number in sorted(spans, key=lambda key: _position(manifest, *key)):
            _read_chunk(reader, manifest, name, number, spans[name, number], wanted[name], parts)
    for name, tensor in wanted.items():  # pieces without values take no read
        if name not in parts:
            parts[name] = torch.empty(_local_shape(tensor), dtype=_entry(manifest, name).torch_dtype)
    return parts


def _entry(manifest: Manifest, name: str) -> Entry:
    entry = manifest.entry(name)
    assert entry is not None, name
    return entry


def _position(manifest: Manifest, name: str, number: int) -> tuple[str, int]:
    chunk = _entry(manifest, name).chunks[number]
    return chunk.file, chunk.at


def _local_shape(tensor: Tensor) -> torch.Size:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.shape


def _read_chunk(
    reader: _Reader,
    manifest: Manifest,
    name: str,
    number: int,
    reads: list[ReadItem],
    wanted: Tensor,
    parts: dict[str, Tensor],
) -> None:
    entry = _entry(manifest, name)
    chunk = entry.chunks[number]
    first, last = _rows(chunk, reads)
    values = reader.rows(name, entry, chunk, first, last)
    shape = _local_shape(wanted)
    for read in reads:
        source = (read.source[0] - first, *read.source[1:]) if read.source else ()
        part = narrow(values, source, read.lengths)
        if part.shape == shape and part.is_contiguous() and len(reads) == 1:
            parts[name] = part
            continue
        if name not in parts:
            parts[name] = torch.empty(shape, dtype=values.dtype)
        narrow(parts[name], read.target, read.lengths).copy_(part)


def _headers(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """What each file's header has to say."""
    said: dict[str, dict[str, Any]] = {name: {} for name in manifest.files}
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            at = chunk.at - manifest.files[chunk.file].header_bytes
            key = shard_file.label(name, entry.shape, chunk.offsets, chunk.sizes)
            said[chunk.file][key] = shard_file.described(entry.torch_dtype, chunk.sizes, at)
    return said


def _rows(chunk: Chunk, reads: list[ReadItem]) -> tuple[int, int]:
    """The rows of the chunk that are needed: what lies before and after them is not read."""
    if not chunk.sizes:
        return 0, 1
    return min(r.source[0] for r in reads), max(r.source[0] + r.lengths[0] for r in reads)


class _Reader:
    """Reads rows of chunks; another thread compares the hashes meanwhile."""

    def __init__(self, folder: Path, block: int) -> None:
        self._folder, self._block = folder, block
        self._checks: list[tuple[Future[str], str, str]] = []
        self._name, self._descriptor = "", -1
        self.hashing = Hashing()

    def __enter__(self) -> _Reader:
        self.hashing.__enter__()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self._compare(0)
        finally:
            self.hashing.__exit__()
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _file(self, name: str) -> int:
        if name != self._name or self._descriptor < 0:
            self._close()
            with _opened(self._folder / name) as descriptor:
                self._descriptor, self._name = os.dup(descriptor), name
        return self._descriptor

    def check_headers(self, manifest: Manifest) -> None:
        """Loading goes by the manifest, other programs go by the headers: both have to say the same."""
        said = _headers(manifest)
        for name, file in manifest.files.items():
            try:
                header = bytearray(file.header_bytes)
                self._read(name, 0, memoryview(header))
                if manifests.digest(bytes(header)) != file.header_hash:
                    raise Rejected(f"the header of {name}: the hash differs")
                if json.loads(header[8:]) != said[name]:
                    raise Rejected(f"the header of {name} says other tensors than {manifests.NAME}")
            except (OSError, Rejected) as error:
                raise damaged(self._folder, _reason(error)) from None
            except (ValueError, RecursionError):
                raise damaged(self._folder, f"the header of {name} is no JSON") from None

    def rows(self, name: str, entry: Entry, chunk: Chunk, first: int, last: int) -> Tensor:
        """Rows `first` up to `last` of a chunk, with whole blocks around them read and compared."""
        dtype = entry.torch_dtype
        width = prod(chunk.sizes[1:]) * dtype.itemsize
        begin = first * width // self._block * self._block
        end = min(-(-last * width // self._block) * self._block, chunk_bytes(entry, chunk))
        shape = (last - first, *chunk.sizes[1:]) if chunk.sizes else ()
        data = torch.empty(max(end - begin, 0), dtype=torch.uint8)
        view = data.numpy().data
        for at in range(0, len(view), self._block):
            known, place = chunk.hashes[(begin + at) // self._block], chunk.at + begin + at
            where = f"{name} in {chunk.file}, bytes {place} and following"
            try:
                self._read(chunk.file, place, view[at : at + self._block])
            except (OSError, Rejected) as error:
                raise damaged(self._folder, f"{name} in {_reason(error)}") from None
            self._checks.append((self.hashing.of(view[at : at + self._block]), known, where))
        self._compare(8)
        start = first * width - begin
        return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _read(self, file: str, at: int, view: memoryview) -> None:
        descriptor = self._file(file)
        while view:
            count = os.preadv(descriptor, [view], at)
            if count == 0:
                raise Rejected(f"{file}: it ends too early")
            view, at = view[count:], at + count

    def _compare(self, leave: int) -> None:
        """All comparisons but the last few, which may go on beside further reading."""
        while len(self._checks) > leave:
            found, known, where = self._checks.pop(0)
            if found.result() != known:
                raise damaged(self._folder, f"{where}: the hash differs")


def read_whole(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    """Every tensor whose name begins with `prefix`, whole, by the rest of its name; aliases too."""
    manifest = checkpoint.manifest
    names = [name for name in (*manifest.tensors, *manifest.aliases) if name.startswith(prefix)]
    wanted = {name: torch.empty(_entry(manifest, name).shape, device="meta") for name in names}
    return {name.removeprefix(prefix): tensor for name, tensor in read_tensors(checkpoint, wanted).items()}


def verify(folder: Path) -> Checkpoint:
    """Read and compare all of it, block by block."""
    checkpoint = open_checkpoint(folder)
    manifest = checkpoint.manifest
    with _Reader(folder, manifest.block) as reader:
        reader.check_headers(manifest)
        chunks = [(name, entry, chunk) for name, entry in manifest.tensors.items() for chunk in entry.chunks]
        for name, entry, chunk in sorted(chunks, key=lambda part: (part[2].file, part[2].at)):
            rows = chunk.sizes[0] if chunk.sizes else 1
            width = max(prod(chunk.sizes[1:]) * entry.torch_dtype.itemsize, 1)
            at_once = max(manifest.block // width, 1) * 4
            for first in range(0, rows if prod(chunk.sizes) else 0, at_once):
                reader.rows(name, entry, chunk, first, min(first + at_once, rows))
    return checkpoint
