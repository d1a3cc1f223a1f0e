"""The checkpoints in a store, and verified reads: the hash of every block is compared before the block is returned."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from io import SEEK_END, RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import shard_file
from paceline.checkpoint.checkpoint_store import Address, CheckpointStore
from paceline.checkpoint.manifest import Chunk, Entry, InvalidManifest, Manifest, UnsupportedFormat, chunk_bytes
from paceline.checkpoint.planner import ReadItem, narrow, plan_load
from paceline.checkpoint.shard_file import BlockHasher
from paceline.errors import CheckpointError
from paceline.run.folder import ROOT, RunFolder

_ItemsOfChunk = dict[tuple[str, int], list[ReadItem]]


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint with a valid manifest and files of the right sizes."""

    at: Address
    manifest: Manifest


@dataclass(frozen=True)
class StoredCheckpoint:
    """What looks like a checkpoint. `manifest` is None if it can't be read."""

    at: Address
    manifest: Manifest | None
    problem: CheckpointError | None = None


def candidates(store: CheckpointStore) -> list[StoredCheckpoint]:
    """The checkpoints in a store, newest first. Checks file sizes, not hashes. Those without a readable manifest are
    sorted by the time of their last change."""
    changed = store.names()
    found = {name: describe(Address(store, name)) for name in sorted(changed)}

    def age(name: str) -> tuple[str, int]:
        if (manifest := found[name].manifest) is not None:
            return (manifest.created, manifest.step)
        return (datetime.fromtimestamp(changed[name], UTC).isoformat(timespec="microseconds"), 0)

    return [found[name] for name in sorted(found, key=age, reverse=True)]


def describe(at: Address) -> StoredCheckpoint:
    try:
        return StoredCheckpoint(at, open_checkpoint(at).manifest)
    except CheckpointError as problem:
        return StoredCheckpoint(at, None, problem)


def verified(store: CheckpointStore, excluding: str | None = None) -> Iterator[Checkpoint]:
    """The intact checkpoints in a store, newest first, each fully verified."""
    for found in candidates(store):
        if found.manifest is not None and found.at.name != excluding:
            with suppress(CheckpointError):
                yield verify(found.at)


def corrupted(at: Address, reason: str) -> CheckpointError:
    return CheckpointError(
        "damaged",
        f"Checkpoint {at} is corrupted: {reason}.",
        why="its files have changed since they were written",
        fix=f"use an older checkpoint; run paceline checkpoint verify {at.store.where()} to find an intact one",
    )


def is_checkpoint(at: Address) -> bool:
    return manifests.NAME in at.store.files(at.name)


def open_checkpoint(at: Address) -> Checkpoint:
    """Read the manifest and check every file's size."""
    files = at.store.files(at.name)
    if manifests.NAME not in files:
        if at.name.startswith("step-") and at.name in at.store.names():
            raise corrupted(at, f"{manifests.NAME} is missing")
        raise CheckpointError(
            "missing",
            f"No checkpoint found at {at}.",
            fix=f"pass the folder with {manifests.NAME}, e.g. {RunFolder(ROOT / 'gpt').checkpoints}/step-000120",
        )
    try:
        limit = manifests.max_bytes(sum(size for name, size in files.items() if fnmatch(name, "rank-*.safetensors")))
        body, digest = (_small_file(at, name, limit) for name in (manifests.NAME, manifests.DIGEST))
        manifest = manifests.decode(body, digest)
        for name, expected in manifest.files.items():
            with at.store.read(at.name, name) as file:
                if (size := file.seek(0, SEEK_END)) != expected.bytes:
                    raise InvalidManifest(f"{name} has {size} bytes, expected {expected.bytes}")
    except UnsupportedFormat as error:
        raise CheckpointError("other-format", f"Checkpoint {at} has an unsupported format: {error}.") from None
    except (OSError, InvalidManifest) as error:
        raise corrupted(at, _reason(error)) from None
    return Checkpoint(at, manifest)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        name, text = Path(error.filename).name if error.filename else "a file", error.strerror or str(error)
        return text if text.startswith(name) else f"{name}: {text}"  # of regular_files
    return str(error)


def _small_file(at: Address, name: str, limit: int) -> bytes:
    with at.store.read(at.name, name) as file:
        if (size := file.seek(0, SEEK_END)) > limit:
            raise InvalidManifest(f"{name} has more than {limit} bytes")
        body = bytearray(size)
        _fill(memoryview(body), file, name, 0)
    return bytes(body)


def _fill(view: memoryview, file: RawIOBase, name: str, at: int) -> None:
    file.seek(at)
    while view:
        count = file.readinto(view)
        if not count:
            raise InvalidManifest(f"{name}: unexpected end of file")
        view = view[count:]


def read_tensors(checkpoint: Checkpoint, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shard of each target, on the CPU, in its saved dtype.

    `targets` are tensors (including meta tensors and DTensors) with the names and shapes in the checkpoint.
    """
    manifest = checkpoint.manifest
    items: _ItemsOfChunk = defaultdict(list)
    for item in plan_load(targets, manifest):
        items[item.name, item.chunk].append(item)
    tensors: dict[str, Tensor] = {}
    with _Reader(checkpoint) as reader:
        reader.check_headers()
        chunks = [(_entry(manifest, name).chunks[index], name, index) for name, index in items]
        for chunk, name, index in sorted(chunks, key=lambda each: (each[0].file, each[0].at)):
            _read_chunk(reader, _entry(manifest, name), chunk, name, items[name, index], targets[name], tensors)
    for name, tensor in targets.items():  # an empty shard has no read items
        if name not in tensors:
            tensors[name] = torch.empty(_local_shape(tensor), dtype=_entry(manifest, name).torch_dtype)
    return tensors


def _entry(manifest: Manifest, name: str) -> Entry:
    entry = manifest.entry(name)
    assert entry is not None, name
    return entry


def _local_shape(tensor: Tensor) -> torch.Size:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.shape


def _read_chunk(
    reader: _Reader,
    entry: Entry,
    chunk: Chunk,
    name: str,
    items: list[ReadItem],
    target: Tensor,
    tensors: dict[str, Tensor],
) -> None:
    first, last = _rows(chunk, items)
    values = reader.rows(name, entry, chunk, first, last)
    shape = _local_shape(target)
    for item in items:
        source = (item.source[0] - first, *item.source[1:]) if item.source else ()
        piece = narrow(values, source, item.lengths)
        if piece.shape == shape and piece.is_contiguous() and len(items) == 1:
            tensors[name] = piece
            continue
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=values.dtype)
        narrow(tensors[name], item.target, item.lengths).copy_(piece)


def _headers(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The expected header of each file."""
    expected: dict[str, dict[str, Any]] = {name: {} for name in manifest.files}
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            at = chunk.at - manifest.files[chunk.file].header_bytes
            key = shard_file.label(name, entry.shape, chunk.offsets, chunk.sizes)
            expected[chunk.file][key] = shard_file.header_entry(entry.torch_dtype, chunk.sizes, at)
    return expected


def _rows(chunk: Chunk, items: list[ReadItem]) -> tuple[int, int]:
    """The range of rows of the chunk that must be read."""
    if not chunk.sizes:
        return 0, 1
    return min(item.source[0] for item in items), max(item.source[0] + item.lengths[0] for item in items)


class _Reader:
    """Reads rows of chunks while another thread hashes them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._at, self._manifest, self._block = checkpoint.at, checkpoint.manifest, checkpoint.manifest.block
        self._checks: list[tuple[Future[str], str, str]] = []
        self._name = ""
        self._file: RawIOBase | None = None
        self._hasher = BlockHasher()

    def __enter__(self) -> _Reader:
        self._hasher.__enter__()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self._compare(0)
        finally:
            self._hasher.__exit__()
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def check_headers(self) -> None:
        """Other programs read the headers instead of the manifest, so both must list the same tensors."""
        expected = _headers(self._manifest)
        for name, file in self._manifest.files.items():
            try:
                header = bytearray(file.header_bytes)
                self._read(name, 0, memoryview(header))
                if manifests.digest(bytes(header)) != file.header_hash:
                    raise InvalidManifest(f"the header of {name}: hash mismatch")
                if json.loads(header[8:]) != expected[name]:
                    raise InvalidManifest(f"the header of {name} does not list the tensors in {manifests.NAME}")
            except (OSError, InvalidManifest) as error:
                raise corrupted(self._at, _reason(error)) from None
            except (ValueError, RecursionError):
                raise corrupted(self._at, f"the header of {name} is not valid JSON") from None

    def rows(self, name: str, entry: Entry, chunk: Chunk, first: int, last: int) -> Tensor:
        """Rows `first` up to `last` of a chunk. The blocks that contain them are read and verified."""
        dtype = entry.torch_dtype
        width = prod(chunk.sizes[1:]) * dtype.itemsize
        begin = first * width // self._block * self._block
        end = min(-(-last * width // self._block) * self._block, chunk_bytes(entry, chunk))
        shape = (last - first, *chunk.sizes[1:]) if chunk.sizes else ()
        data = torch.empty(max(end - begin, 0), dtype=torch.uint8)
        view = data.numpy().data
        for at in range(0, len(view), self._block):
            expected, place = chunk.hashes[(begin + at) // self._block], chunk.at + begin + at
            where = f"{name} in {chunk.file}, block at byte {place}"
            try:
                self._read(chunk.file, place, view[at : at + self._block])
            except (OSError, InvalidManifest) as error:
                raise corrupted(self._at, f"{name} in {_reason(error)}") from None
            self._checks.append((self._hasher.submit(view[at : at + self._block]), expected, where))
        self._compare(8)
        start = first * width - begin
        return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _read(self, name: str, at: int, view: memoryview) -> None:
        if self._file is None or name != self._name:
            self._close()
            self._file, self._name = self._at.store.read(self._at.name, name), name
        _fill(view, self._file, name, at)

    def _compare(self, leave: int) -> None:
        """Compare all but the last `leave` hashes, which may be computed during further reads."""
        while len(self._checks) > leave:
            found, expected, where = self._checks.pop(0)
            if found.result() != expected:
                raise corrupted(self._at, f"{where}: hash mismatch")


def verify(at: Address) -> Checkpoint:
    """Read every block and compare its hash."""
    checkpoint = open_checkpoint(at)
    manifest = checkpoint.manifest
    with _Reader(checkpoint) as reader:
        reader.check_headers()
        chunks = [(name, entry, chunk) for name, entry in manifest.tensors.items() for chunk in entry.chunks]
        for name, entry, chunk in sorted(chunks, key=lambda part: (part[2].file, part[2].at)):
            rows = chunk.sizes[0] if chunk.sizes else 1
            width = max(prod(chunk.sizes[1:]) * entry.torch_dtype.itemsize, 1)
            at_once = max(manifest.block // width, 1) * 4
            for first in range(0, rows if prod(chunk.sizes) else 0, at_once):
                reader.rows(name, entry, chunk, first, min(first + at_once, rows))
    return checkpoint
