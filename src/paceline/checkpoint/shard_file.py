"""The file of one rank, in the safetensors format. A second thread hashes while the first one writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint_store import Write
from paceline.checkpoint.manifest import BLOCK, CODES, Chunk, File, digest
from paceline.checkpoint.planner import WriteItem
from paceline.errors import CheckpointError

_ALIGNMENT = 8
_INLINE = 64 << 10  # bytes; smaller blocks are hashed inline, which is cheaper than using the thread


@dataclass(frozen=True)
class FileLayout:
    """The items of a file in the order in which they are written."""

    header: bytes
    items: list[WriteItem]
    starts: list[int]  # byte offsets, from the end of the header
    size: int  # of all items, in bytes


@dataclass
class Written:
    """The report of a rank to rank 0, which writes the manifest."""

    name: str
    file: File
    chunks: list[tuple[WriteItem, Chunk]]
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        chunks = [[item.name, CODES[item.dtype], list(item.shape), chunk.model_dump()] for item, chunk in self.chunks]
        return {"name": self.name, "file": self.file.model_dump(), "chunks": chunks, "seconds": self.seconds}


def require_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in CODES:
        raise CheckpointError(
            "dtype", f"Unsupported dtype: {name} is {dtype}, which the safetensors format can't store."
        )


def lay_out(items: Sequence[WriteItem]) -> FileLayout:
    """Sorts wide dtypes first, so that every item is aligned."""
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)
    header: dict[str, Any] = {}
    starts, at = [], 0
    for item in ordered:
        require_dtype(item.name, item.dtype)
        header[label(item.name, item.shape, item.offsets, item.sizes)] = header_entry(item.dtype, item.sizes, at)
        starts.append(at)
        at += prod(item.sizes) * item.dtype.itemsize
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return FileLayout(len(text).to_bytes(8, "little") + text, ordered, starts, at)


def label(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name of a tensor, with the slice if it is a chunk: `model/tokens.weight[0:128,64:128]`."""
    if list(sizes) == list(shape):
        return name
    spans = zip(offsets, sizes, strict=True)
    return f"{name}[{','.join(f'{offset}:{offset + size}' for offset, size in spans)}]"


def header_entry(dtype: torch.dtype, sizes: Sequence[int], at: int) -> dict[str, Any]:
    """The entry of a tensor in the header of a safetensors file."""
    end = at + prod(sizes) * dtype.itemsize
    return {"dtype": CODES[dtype], "shape": list(sizes), "data_offsets": [at, end]}


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_file(
    file: AbstractContextManager[Write], name: str, layout: FileLayout, item_bytes: Callable[[int], memoryview]
) -> Written:
    """Write the items, whose bytes `item_bytes` returns by index, to the file `name`."""
    began = perf_counter()
    chunks: list[tuple[WriteItem, list[Future[str]], int]] = []
    with BlockHasher() as hasher:
        with file as write:
            write(memoryview(layout.header))
            for index, item in enumerate(layout.items):
                hashes = _write_item(write, item_bytes(index), hasher)
                chunks.append((item, hashes, len(layout.header) + layout.starts[index]))
        made = [(item, _chunk(name, item, at, hashes)) for item, hashes, at in chunks]
    header = layout.header
    written = File(bytes=len(header) + layout.size, header_bytes=len(header), header_hash=digest(header))
    return Written(name, written, made, {"write": perf_counter() - began, "hash": hasher.busy})


def _write_item(write: Write, data: memoryview, hasher: BlockHasher) -> list[Future[str]]:
    hashes = []
    for at in range(0, len(data), BLOCK):
        hashes.append(hasher.submit(data[at : at + BLOCK]))
        write(data[at : at + BLOCK])
    return hashes


def _chunk(file: str, item: WriteItem, at: int, hashes: list[Future[str]]) -> Chunk:
    offsets, sizes = list(item.offsets), list(item.sizes)
    return Chunk(file=file, at=at, offsets=offsets, sizes=sizes, hashes=[each.result() for each in hashes])


class BlockHasher:
    """Hashes blocks on a separate thread. Hashing, reading and writing all release the GIL. `busy` is in seconds."""

    def __init__(self) -> None:
        self.busy = 0.0

    def __enter__(self) -> BlockHasher:
        self._pool = ThreadPoolExecutor(1, "paceline-hash")
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, block: memoryview) -> Future[str]:
        if len(block) >= _INLINE:
            return self._pool.submit(self._digest, block)
        done: Future[str] = Future()
        done.set_result(self._digest(block))
        return done

    def _digest(self, block: memoryview) -> str:
        began = perf_counter()
        text = digest(block)
        self.busy += perf_counter() - began
        return text
