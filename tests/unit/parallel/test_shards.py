"""Pieces of tensors that are cut over ranks, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import paceline
from paceline.parallel.shards import as_dtensor_like, copy_shard_, local_shard, retie, shard_of, tied_parameters

SHAPES = [(1,), (3,), (8,), (7, 5), (2, 6)]


def _pieces() -> list[bool]:
    torch.distributed.init_process_group("gloo")
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    facts = []
    for shape in SHAPES:
        for mesh, places in ((flat, [Shard(0)]), (square, [Replicate(), Shard(0)]), (flat, [Replicate()])):
            whole = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float64).reshape(shape)
            there = distribute_tensor(whole.clone(), mesh, places)
            facts.append(torch.equal(shard_of(whole, there), there.to_local()))
            facts.append(
                local_shard(there).untyped_storage().data_ptr() == there.to_local().untyped_storage().data_ptr()
            )
            copy_shard_(there, whole * 2)
            facts.append(torch.equal(there.full_tensor(), whole * 2))
            back = as_dtensor_like(there, local_shard(there))
            facts.append(isinstance(back, DTensor) and torch.equal(back.full_tensor(), whole * 2))
            facts.append(as_dtensor_like(there, there) is there and as_dtensor_like(there, torch.zeros(())).dim() == 0)
    torch.distributed.destroy_process_group()
    return facts


def test_a_shard_is_what_torch_puts_on_the_rank_and_can_be_reassembled() -> None:
    facts = paceline.launch(_pieces, ranks=4)
    assert len(facts) == len(SHAPES) * 15
    assert all(facts)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.third.weight = self.first.weight


def test_ties_are_found_and_made_again() -> None:
    model = Tied()
    groups = tied_parameters(model)
    assert groups == [["first.weight", "third.weight"]]
    model.third.weight = nn.Parameter(torch.zeros(2, 2))
    assert not tied_parameters(model)
    retie(model, groups)
    assert model.third.weight is model.first.weight


def test_a_plain_tensor_is_its_own_piece() -> None:
    tensor: Tensor = torch.ones(3)
    assert local_shard(tensor) is tensor
    assert shard_of(tensor, torch.zeros(3)) is tensor
