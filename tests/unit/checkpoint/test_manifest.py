"""A manifest that passes is safe to act on; every other one is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.manifest import InvalidManifest, Manifest

HASH = "0" * 32
FILE = "rank-0.safetensors"
Rectangle = tuple[list[int], list[int]]  # offsets and sizes


def described(rectangles: list[Rectangle], shape: list[int]) -> dict[str, Any]:
    """A tensor of bytes, whose rectangles lie in one file one after the other."""
    chunks, at = [], 16
    for offsets, sizes in rectangles:
        count = 1
        for size in sizes:
            count *= size
        hashes = [HASH] * (count > 0)
        chunks.append({"file": FILE, "at": at, "offsets": offsets, "sizes": sizes, "hashes": hashes})
        at += count
    return {
        "format": manifests.FORMAT, "step": 3, "epoch": 0, "optimizer": True, "created": "", "parent": None,
        "versions": {}, "layout": {}, "recipe": {}, "data": {}, "state": {}, "metadata": None, "block": 4096,
        "files": {FILE: {"bytes": at, "header_bytes": 16, "header_hash": HASH}},
        "tensors": {"w": {"dtype": "U8", "shape": shape, "chunks": chunks}}, "aliases": {},
    }  # fmt: skip


def decode(value: Any) -> Manifest:
    body = json.dumps(value).encode()
    return manifests.decode(body, f"{manifests.digest(body)}  {manifests.NAME}\n".encode())


HALVES: list[Rectangle] = [([0, 0], [2, 4]), ([2, 0], [2, 4])]


def test_what_was_encoded_is_decoded() -> None:
    manifest = decode(described(HALVES, [4, 4]))
    assert manifests.decode(*manifests.encode(manifest)) == manifest


def test_a_digest_of_another_manifest_is_refused() -> None:
    body, _ = manifests.encode(decode(described(HALVES, [4, 4])))
    with pytest.raises(InvalidManifest, match=r"does not match manifest\.xxh128"):
        manifests.decode(body, f"{HASH}  {manifests.NAME}\n".encode())


def chunk(value: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = value["tensors"]["w"]["chunks"][number]
    return found


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda m: m.update(format=99), "format 99"),
    "an unknown key": (lambda m: m.update(more=1), "more"),
    "a missing key": (lambda m: m.pop("step"), "step"),
    "a negative step": (lambda m: m.update(step=-1), "step"),
    "a step in quotes": (lambda m: m.update(step="3"), "step"),
    "a file elsewhere": (lambda m: chunk(m).update(file="../rank-0.safetensors"), "file"),
    "a file that is not listed": (lambda m: chunk(m).update(file="rank-1.safetensors"), "unknown file rank-1"),
    "an unknown dtype": (lambda m: m["tensors"]["w"].update(dtype="F7"), "dtype F7"),
    "another number of dimensions": (lambda m: chunk(m).update(offsets=[0]), "wrong number of dimensions"),
    "a chunk outside": (lambda m: chunk(m).update(offsets=[3, 0]), "outside"),
    "a chunk twice": (lambda m: chunk(m, 1).update(offsets=[0, 0]), "overlap"),
    "a chunk less": (lambda m: m["tensors"]["w"]["chunks"].pop(), "8 of 16 values"),
    "a hash less": (lambda m: chunk(m).update(hashes=[]), "0 hashes for 1 blocks"),
    "bytes used twice": (lambda m: chunk(m, 1).update(at=16), "overlap or leave a gap"),
    "bytes of nobody": (lambda m: m["files"][FILE].update(bytes=99), "overlap or leave a gap"),
    "an alias to nowhere": (lambda m: m["aliases"].update(v="x"), "does not exist"),
    "a size beyond all disks": (lambda m: m["tensors"]["w"].update(shape=[2**60, 4]), "shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_values_are_refused(name: str) -> None:
    change, words = BAD[name]
    value = described(HALVES, [4, 4])
    change(value)
    with pytest.raises(InvalidManifest, match=words):
        decode(value)


def cells(rectangle: Rectangle) -> set[tuple[int, ...]]:
    spans = [range(offset, offset + size) for offset, size in zip(*rectangle, strict=True)]
    return set(product(*spans))


@st.composite
def coverings(draw: st.DrawFn) -> tuple[list[Rectangle], list[int]]:
    """Rectangles with as many cells as the shape, which may be a cut of it, or not."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    pieces: list[Rectangle] = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 4))):
        offsets, sizes = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        first, second = list(sizes), list(sizes)
        first[dim], second[dim] = at, sizes[dim] - at
        moved = list(offsets)
        moved[dim] += at
        pieces += [(offsets, first), (moved, second)]
    if draw(st.booleans()):  # one of them is moved
        number = draw(st.integers(0, len(pieces) - 1))
        sizes = pieces[number][1]
        offsets = [draw(st.integers(0, whole - size)) for whole, size in zip(shape, sizes, strict=True)]
        pieces[number] = (offsets, sizes)
    return pieces, shape


@settings(max_examples=100, deadline=None)
@given(coverings())
def test_chunks_pass_exactly_when_they_make_up_the_tensor(made: tuple[list[Rectangle], list[int]]) -> None:
    pieces, shape = made
    whole = cells(([0] * len(shape), shape))
    union = set().union(*(cells(piece) for piece in pieces))
    if union == whole:
        decode(described(pieces, shape))
    else:
        with pytest.raises(InvalidManifest):
            decode(described(pieces, shape))


def test_many_chunks_are_looked_at_without_comparing_each_with_each() -> None:
    number = 10_000
    decode(described([([row], [1]) for row in range(number)], [number]))
