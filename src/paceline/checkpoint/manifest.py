"""The manifest: what a checkpoint contains and where, with a hash of every block. See docs/reference/checkpoint.md.

Files on a disk may be corrupted or forged. A manifest that `decode` accepts is safe to use: names stay inside the
folder, every byte of every file belongs to exactly one chunk, and the chunks of a tensor cover it without gaps or
overlaps, so nothing larger than the files themselves is ever allocated.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise, product
from math import prod
from typing import Annotated, Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, StringConstraints, ValidationError

FORMAT = 2
BLOCK = 16 << 20  # bytes per hash
_LARGEST_MANIFEST = 256 << 20  # bytes; larger ones are rejected
_SMALL_MANIFEST = 4 << 20  # bytes that are always accepted
_PARSED_FACTOR = 16  # memory of a parsed manifest per byte: a large one must describe as much tensor data
_MAX_SHARDED_DIMS = 8
NAME, DIGEST = "manifest.json", "manifest.xxh128"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, StringConstraints(pattern=r"^rank-[0-9]{1,6}\.safetensors$")]
Extents = Annotated[list[Annotated[int, Field(ge=0, le=1 << 48)]], Field(max_length=64)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Chunk(_Record):
    """A rectangle of a tensor, contiguous in its file."""

    file: FileName
    at: NonNegativeInt  # byte offset in the file
    offsets: Extents
    sizes: Extents
    hashes: list[Hash]  # one for each block


class Entry(_Record):
    """A tensor."""

    dtype: str
    shape: Extents
    chunks: list[Chunk]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class File(_Record):
    """A safetensors file."""

    bytes: NonNegativeInt
    header_bytes: NonNegativeInt
    header_hash: Hash


class Manifest(_Record):
    format: int
    step: NonNegativeInt
    epoch: NonNegativeInt
    optimizer: bool  # whether it has optimizer state, without which a resumed run differs
    created: str
    parent: str | None  # the checkpoint saved or loaded before this one
    versions: dict[str, str]
    layout: dict[str, Any]
    recipe: dict[str, Any]
    data: dict[str, Any]  # position in the data
    state: dict[str, Any]  # plain values of the state entries
    metadata: Any
    block: Annotated[int, Field(ge=4096, le=1 << 30, multiple_of=4096)]  # bytes per hash
    files: dict[FileName, File]
    tensors: dict[str, Entry]
    aliases: dict[str, str]  # other names of tensors, such as tied weights

    def entry(self, name: str) -> Entry | None:
        return self.tensors.get(self.aliases.get(name, name))


class InvalidManifest(ValueError):
    """The reason why a manifest is rejected."""


class UnsupportedFormat(InvalidManifest):
    """A manifest of another format version."""


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def max_bytes(tensor_bytes: int) -> int:
    """The size limit of a manifest that describes `tensor_bytes`."""
    return min(_LARGEST_MANIFEST, max(_SMALL_MANIFEST, tensor_bytes // _PARSED_FACTOR))


def chunk_bytes(entry: Entry, chunk: Chunk) -> int:
    return prod(chunk.sizes) * entry.torch_dtype.itemsize


def encode(manifest: Manifest) -> tuple[bytes, bytes]:
    """The contents of both files. The second can be checked with `xxh128sum -c`."""
    body = manifest.model_dump_json().encode() + b"\n"
    return body, f"{digest(body)}  {NAME}\n".encode()


def decode(body: bytes, digest_file: bytes) -> Manifest:
    if digest_file != f"{digest(body)}  {NAME}\n".encode():
        raise InvalidManifest(f"{NAME} does not match {DIGEST}")
    try:
        manifest = Manifest.model_validate_json(body)
    except (ValidationError, RecursionError) as error:
        found = re.match(rb'\{"format":(\d{1,9}),', body)  # always the first key
        if found and int(found[1]) != FORMAT:
            raise UnsupportedFormat(f"format {int(found[1])}, expected {FORMAT}") from None
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deeply"}
        place = ".".join(str(part) for part in first["loc"]) or "manifest"
        raise InvalidManifest(f"{NAME}: {place[:200]}: {first['msg']}") from None
    if manifest.format != FORMAT:
        raise UnsupportedFormat(f"format {manifest.format}, expected {FORMAT}")
    for name, entry in manifest.tensors.items():
        problem = _problem(entry, manifest)
        if problem:
            raise InvalidManifest(f"{NAME}: {name}: {problem}")
    for name, target in manifest.aliases.items():
        if target not in manifest.tensors:
            raise InvalidManifest(f"{NAME}: {name} is an alias of {target}, which does not exist")
    _check_files(manifest)
    for name, entry in manifest.tensors.items():
        if _overlap(entry):
            raise InvalidManifest(f"{NAME}: {name}: chunks overlap")
    return manifest


def _problem(entry: Entry, manifest: Manifest) -> str | None:
    if entry.dtype not in DTYPES:
        return f"unknown dtype {entry.dtype}"
    for chunk in entry.chunks:
        if chunk.file not in manifest.files:
            return f"unknown file {chunk.file}"
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.shape):
            return "a chunk has the wrong number of dimensions"
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)):
            return f"a chunk is outside of the shape {entry.shape}"
        blocks = -(-chunk_bytes(entry, chunk) // manifest.block)
        if len(chunk.hashes) != blocks:
            return f"{len(chunk.hashes)} hashes for {blocks} blocks"
    covered = sum(prod(chunk.sizes) for chunk in entry.chunks)
    return f"chunks cover {covered} of {prod(entry.shape)} values" if covered != prod(entry.shape) else None


def _overlap(entry: Entry) -> bool:
    """Whether chunks overlap, in time linear in their number.

    Each corner of a rectangle has an alternating sign. The corners of adjacent chunks cancel out, so chunks that tile a
    tensor leave only the corners of the tensor.
    """
    sharded = [dim for dim, size in enumerate(entry.shape) if any(chunk.sizes[dim] != size for chunk in entry.chunks)]
    if len(sharded) > _MAX_SHARDED_DIMS:
        raise InvalidManifest(f"{NAME}: a tensor is sharded in {len(sharded)} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for corner in product((0, 1), repeat=len(sharded)):
        sign = (-1) ** sum(corner)
        corners[tuple(end * entry.shape[dim] for dim, end in zip(sharded, corner, strict=True))] -= sign
        for chunk in entry.chunks:
            if prod(chunk.sizes):
                ends = zip(sharded, corner, strict=True)
                corners[tuple(chunk.offsets[dim] + end * chunk.sizes[dim] for dim, end in ends)] += sign
    return prod(entry.shape) > 0 and any(corners.values())


def _check_files(manifest: Manifest) -> None:
    """Require that the chunks of a file cover it from the end of its header to its end."""
    spans: dict[str, list[tuple[int, int]]] = {
        name: [(0, file.header_bytes), (file.bytes, file.bytes)] for name, file in manifest.files.items()
    }
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            spans[chunk.file].append((chunk.at, chunk.at + chunk_bytes(entry, chunk)))
    for name, parts in spans.items():
        parts.sort()
        if any(end != begin for (_, end), (begin, _) in pairwise(parts)):
            raise InvalidManifest(f"{NAME}: chunks of {name} overlap or leave a gap")
