from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.local_store import Filesystem, new_file
from paceline.checkpoint.manifest import digest
from paceline.checkpoint.planner import WriteItem
from paceline.checkpoint.shard_file import bytes_of, label, lay_out, write_file
from paceline.errors import CheckpointError


def item(name: str, tensor: torch.Tensor) -> WriteItem:
    return WriteItem(name, tensor.dtype, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))


TENSORS = {
    "bytes": torch.arange(3, dtype=torch.uint8),
    "half": torch.arange(5).bfloat16(),
    "wide": torch.arange(4, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
}


def test_every_item_is_aligned_to_its_dtype_whatever_order_they_come_in() -> None:
    layout = lay_out([item(name, tensor) for name, tensor in TENSORS.items()])
    assert len(layout.header) % 8 == 0
    assert [start % each.dtype.itemsize for start, each in zip(layout.starts, layout.items, strict=True)] == [0] * 4
    assert layout.size == sum(tensor.nbytes for tensor in TENSORS.values())


def test_a_written_file_is_safetensors_and_its_hashes_are_those_of_its_bytes(tmp_path: Path) -> None:
    layout = lay_out([item(name, tensor) for name, tensor in TENSORS.items()])
    ordered = [TENSORS[each.name] for each in layout.items]
    path = tmp_path / "rank-0.safetensors"
    written = write_file(new_file(Filesystem(), path), path.name, layout, lambda index: bytes_of(ordered[index]))
    loaded = load_file(path)
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {n: t.dtype for n, t in TENSORS.items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    content = path.read_bytes()
    assert written.file.bytes == len(content)
    for each, chunk in written.chunks:
        data = content[chunk.at : chunk.at + TENSORS[each.name].nbytes]
        assert chunk.hashes == ([digest(data)] if data else [])


def test_a_chunk_is_labelled_with_its_slice() -> None:
    assert label("w", [4, 2], [0, 0], [4, 2]) == "w"
    assert label("w", [4, 2], [2, 0], [2, 2]) == "w[2:4,0:2]"


def test_a_dtype_that_safetensors_does_not_have_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        lay_out([item("z", torch.zeros(2, dtype=torch.complex128))])
    assert caught.value.code == "checkpoint.dtype"
