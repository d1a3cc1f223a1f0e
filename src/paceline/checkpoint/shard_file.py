"""One rank's file: its tensors' bytes in safetensors' format, hashed by a second thread while the first one writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.filesystem import Filesystem, write_all
from paceline.checkpoint.hashing import Hashing
from paceline.checkpoint.manifest import BLOCK, CODES, Chunk, File, digest
from paceline.checkpoint.planner import WriteItem
from paceline.errors import CheckpointError

_ALIGNMENT = 8


@dataclass(frozen=True)
class FileLayout:
    """Where each share lies in a file, in the order in which they are written."""

    header: bytes
    shares: list[WriteItem]
    starts: list[int]  # counted from the first byte after the header
    size: int  # of all shares


@dataclass
class Written:
    """What a rank tells the one that writes the manifest."""

    name: str
    file: File
    chunks: list[tuple[WriteItem, Chunk]]
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        chunks = [
            [share.name, CODES[share.dtype], list(share.shape), chunk.model_dump()] for share, chunk in self.chunks
        ]
        return {"name": self.name, "file": self.file.model_dump(), "chunks": chunks, "seconds": self.seconds}


def require_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in CODES:
        raise CheckpointError(
            "dtype",
            f"{name} is of {dtype}, for which the safetensors format has no word.",
            fix="keep it in another dtype",
        )


def lay_out(shares: Sequence[WriteItem]) -> FileLayout:
    """Wide dtypes first, so that all are aligned."""
    ordered = sorted(shares, key=lambda share: -share.dtype.itemsize)
    header: dict[str, Any] = {}
    starts, at = [], 0
    for share in ordered:
        require_dtype(share.name, share.dtype)
        header[label(share.name, share.shape, share.offsets, share.sizes)] = described(share.dtype, share.sizes, at)
        starts.append(at)
        at += prod(share.sizes) * share.dtype.itemsize
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return FileLayout(len(text).to_bytes(8, "little") + text, ordered, starts, at)


def label(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """A tensor's name; of a part of one, with where it lies: `model/tokens.weight[0:128,64:128]`."""
    if list(sizes) == list(shape):
        return name
    spans = zip(offsets, sizes, strict=True)
    return f"{name}[{','.join(f'{offset}:{offset + size}' for offset, size in spans)}]"


def described(dtype: torch.dtype, sizes: Sequence[int], at: int) -> dict[str, Any]:
    """A tensor as safetensors' header has it."""
    end = at + prod(sizes) * dtype.itemsize
    return {"dtype": CODES[dtype], "shape": list(sizes), "data_offsets": [at, end]}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU: the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_file(disk: Filesystem, path: Path, layout: FileLayout, share_bytes: Callable[[int], memoryview]) -> Written:
    """Write the shares, each of whose bytes `share_bytes` gives by number; on the disk when this returns."""
    began = perf_counter()
    chunks: list[tuple[WriteItem, list[Future[str]], int]] = []
    with Hashing() as hashing:
        descriptor = disk.create(path)
        try:
            write_all(disk, descriptor, memoryview(layout.header))
            for number, share in enumerate(layout.shares):
                hashes = _write_share(disk, descriptor, share_bytes(number), hashing)
                chunks.append((share, hashes, len(layout.header) + layout.starts[number]))
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        made = [(share, _chunk(path.name, share, at, hashes)) for share, hashes, at in chunks]
    header = layout.header
    file = File(bytes=len(header) + layout.size, header_bytes=len(header), header_hash=digest(header))
    return Written(path.name, file, made, {"write": perf_counter() - began, "hash": hashing.busy})


def _write_share(disk: Filesystem, descriptor: int, data: memoryview, hashing: Hashing) -> list[Future[str]]:
    hashes = []
    for at in range(0, len(data), BLOCK):
        hashes.append(hashing.of(data[at : at + BLOCK]))
        write_all(disk, descriptor, data[at : at + BLOCK])
    return hashes


def _chunk(file: str, share: WriteItem, at: int, hashes: list[Future[str]]) -> Chunk:
    offsets, sizes = list(share.offsets), list(share.sizes)
    return Chunk(file=file, at=at, offsets=offsets, sizes=sizes, hashes=[each.result() for each in hashes])
