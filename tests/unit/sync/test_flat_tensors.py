"""Many tensors as one flat tensor, in pieces."""

from __future__ import annotations

import torch

from paceline.sync.flat_tensors import FlatTensors, by_kind, has_gaps


def test_pieces_of_limited_size_hold_all_elements_of_any_memory_format() -> None:
    tensors = {
        "plain": torch.arange(7.0),
        "none": torch.empty(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "images": torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    }
    flat = FlatTensors(tensors, piece_bytes=5 * 4)
    assert [piece.stop - piece.start for piece in flat.pieces] == [5, 5, 5, 5, 5, 4]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copied = flat.pack(flat.whole)
    for piece in flat.pieces:
        assert torch.equal(flat.pack(piece), copied[piece])
        flat.unpack(piece, 2 * copied[piece])
    for name, view in flat.views(copied).items():
        assert torch.equal(view, before[name]) and torch.equal(tensors[name], 2 * view)


def test_a_complex_number_is_two_elements() -> None:
    tensors = {"a": torch.randn(2, dtype=torch.complex64), "b": torch.randn(2, 3, dtype=torch.complex64).t()}
    flat = FlatTensors(tensors, piece_bytes=3 * 4)
    copied = flat.pack(flat.whole)
    assert copied.dtype is torch.float32 and len(copied) == 16
    assert all(torch.equal(view, tensors[name]) for name, view in flat.views(copied).items())
    for piece in flat.pieces:
        flat.unpack(piece, 2 * copied[piece])
    assert all(torch.equal(2 * view, tensors[name]) for name, view in flat.views(copied).items())


def test_half_precision_is_averaged_in_float32() -> None:
    half, double = by_kind({"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(1).double()})
    assert half.pack(half.whole).dtype is torch.float32 and double.pack(double.whole).dtype is torch.float64
    half.unpack(half.whole, torch.tensor([1.5, 3.0]))
    assert half.tensors["a"].tolist() == [1.5, 3.0]


def test_gaps_in_memory_are_found() -> None:
    square = torch.zeros(4, 4)
    assert has_gaps(square[:, :2]) and has_gaps(square[::2]) and has_gaps(torch.zeros(1).expand(3))
    assert (
        not has_gaps(square) and not has_gaps(square.t()) and not has_gaps(torch.zeros(())) and not has_gaps(square[:2])
    )
