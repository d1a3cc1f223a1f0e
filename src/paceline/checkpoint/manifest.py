"""The manifest: what a checkpoint holds and where, with a hash for every block of it. See docs/reference/checkpoint.md.

Whatever is read from a disk may be damaged or made up. A manifest that passes `decode` is safe to act on: names stay
inside the folder, every byte of every file belongs to exactly one chunk, and the chunks of a tensor make it up without
gap or overlap, so nothing larger than the files themselves is ever allocated.
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
BLOCK = 16 << 20  # bytes that have one hash
_LARGEST = 256 << 20  # bytes of a manifest that are looked at
_USUAL = 4 << 20  # bytes of a manifest that nobody wonders about
_PARSED = 16  # times its bytes are what a manifest may take in memory: a longer one has to describe as much
_MOST_CUTS = 8  # dimensions
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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Chunk(_Part):
    """A rectangle of a tensor, whose bytes lie in one piece."""

    file: FileName
    at: NonNegativeInt  # the byte of the file at which it begins
    offsets: Extents
    sizes: Extents
    hashes: list[Hash]  # of each block of its bytes


class Entry(_Part):
    """A tensor."""

    dtype: str
    shape: Extents
    chunks: list[Chunk]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class File(_Part):
    """A safetensors file: its size, and the hash of what comes before the tensors' bytes."""

    bytes: NonNegativeInt
    header_bytes: NonNegativeInt
    header_hash: Hash


class Manifest(_Part):
    format: int
    step: NonNegativeInt
    epoch: NonNegativeInt
    optimizer: bool  # whether the optimizer's state is in it: without, a run can't go on exactly
    created: str
    parent: str | None  # the checkpoint that was saved or loaded before it
    versions: dict[str, str]
    layout: dict[str, Any]
    recipe: dict[str, Any]
    data: dict[str, Any]  # the position in the data, and what it means
    state: dict[str, Any]  # plain values of optimizer, schedule, scaler, callbacks, …
    metadata: Any
    block: Annotated[int, Field(ge=4096, le=1 << 30, multiple_of=4096)]  # bytes that have one hash
    files: dict[FileName, File]
    tensors: dict[str, Entry]
    aliases: dict[str, str]  # further names of tensors

    def entry(self, name: str) -> Entry | None:
        return self.tensors.get(self.aliases.get(name, name))


class Rejected(ValueError):
    """Why a manifest is none."""


class OtherFormat(Rejected):
    """It is one, but of another version."""


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def longest(tensors: int) -> int:
    """The bytes that a manifest may have beside so many bytes of tensors."""
    return min(_LARGEST, max(_USUAL, tensors // _PARSED))


def chunk_bytes(entry: Entry, chunk: Chunk) -> int:
    return prod(chunk.sizes) * entry.torch_dtype.itemsize


def encode(manifest: Manifest) -> tuple[bytes, bytes]:
    """The contents of both files. The second is what `xxh128sum -c` reads."""
    body = manifest.model_dump_json().encode() + b"\n"
    return body, f"{digest(body)}  {NAME}\n".encode()


def decode(body: bytes, digest_file: bytes) -> Manifest:
    if digest_file != f"{digest(body)}  {NAME}\n".encode():
        raise Rejected(f"{NAME} is not what {DIGEST} was made from")
    try:
        manifest = Manifest.model_validate_json(body)
    except (ValidationError, RecursionError) as error:
        found = re.match(rb'\{"format":(\d{1,9}),', body)  # always its first word
        if found and int(found[1]) != FORMAT:
            raise OtherFormat(f"it has the format {int(found[1])}, this version reads {FORMAT}") from None
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deeply"}
        place = ".".join(str(part) for part in first["loc"]) or "all of it"
        raise Rejected(f"{NAME}: {place[:200]}: {first['msg']}") from None
    if manifest.format != FORMAT:
        raise OtherFormat(f"it has the format {manifest.format}, this version reads {FORMAT}")
    for name, entry in manifest.tensors.items():
        problem = _problem(entry, manifest)
        if problem:
            raise Rejected(f"{NAME}: {name}: {problem}")
    for name, target in manifest.aliases.items():
        if target not in manifest.tensors:
            raise Rejected(f"{NAME}: {name} stands for {target}, which is not there")
    _check_files(manifest)
    for name, entry in manifest.tensors.items():
        if _overlap(entry):
            raise Rejected(f"{NAME}: {name}: its chunks overlap")
    return manifest


def _problem(entry: Entry, manifest: Manifest) -> str | None:
    if entry.dtype not in DTYPES:
        return f"the dtype {entry.dtype} is unknown"
    for chunk in entry.chunks:
        if chunk.file not in manifest.files:
            return f"it lies in {chunk.file}, which is not listed"
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.shape):
            return "a chunk has other dimensions"
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)):
            return f"a chunk lies outside of its shape {entry.shape}"
        blocks = -(-chunk_bytes(entry, chunk) // manifest.block)
        if len(chunk.hashes) != blocks:
            return f"there are {len(chunk.hashes)} hashes for {blocks} blocks"
    covered = sum(prod(chunk.sizes) for chunk in entry.chunks)
    return f"its chunks hold {covered} of {prod(entry.shape)} values" if covered != prod(entry.shape) else None


def _overlap(entry: Entry) -> bool:
    """Whether the chunks are anything else than the tensor, cut up; in a time that grows with their number only.

    Corners of rectangles carry signs, + and - in turn. Where two chunks meet, theirs cancel out, so that of a tensor
    that is cut up its own corners are left.
    """
    cut = [dim for dim, size in enumerate(entry.shape) if any(chunk.sizes[dim] != size for chunk in entry.chunks)]
    if len(cut) > _MOST_CUTS:
        raise Rejected(f"{NAME}: a tensor is cut in {len(cut)} dimensions")
    marks: Counter[tuple[int, ...]] = Counter()
    for corner in product((0, 1), repeat=len(cut)):
        sign = (-1) ** sum(corner)
        marks[tuple(end * entry.shape[dim] for dim, end in zip(cut, corner, strict=True))] -= sign
        for chunk in entry.chunks:
            if prod(chunk.sizes):
                marks[tuple(chunk.offsets[d] + end * chunk.sizes[d] for d, end in zip(cut, corner, strict=True))] += (
                    sign
                )
    return prod(entry.shape) > 0 and any(marks.values())


def _check_files(manifest: Manifest) -> None:
    """The chunks of a file follow each other from its header to its end."""
    spans: dict[str, list[tuple[int, int]]] = {
        name: [(0, file.header_bytes), (file.bytes, file.bytes)] for name, file in manifest.files.items()
    }
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            spans[chunk.file].append((chunk.at, chunk.at + chunk_bytes(entry, chunk)))
    for name, parts in spans.items():
        parts.sort()
        if any(end != begin for (_, end), (begin, _) in pairwise(parts)):
            raise Rejected(f"{NAME}: the chunks of {name} leave a gap or overlap")
