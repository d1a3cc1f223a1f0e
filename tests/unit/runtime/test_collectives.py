"""A world of one rank: no process group, and every collective returns what its definition gives for one rank."""

from __future__ import annotations

import pytest
import torch

from paceline import dist
from paceline.errors import WorldError


def test_rank_facts() -> None:
    assert (dist.rank(), dist.world(), dist.local_rank(), dist.is_main(), dist.is_initialized()) == (
        0, 1, 0, True, False,
    )  # fmt: skip


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_reduction_over_one_rank_is_the_tensor_itself(op: str, async_op: bool) -> None:
    tensor = torch.tensor([1.0, 2.0])
    for reduce in (dist.all_reduce, dist.reduce):
        work = reduce(tensor, op=op, async_op=async_op)
        if async_op:
            work.wait()
            assert work.is_completed()
    received = torch.zeros(2)
    dist.reduce_scatter(received, [tensor], op=op)
    assert torch.equal(received, torch.tensor([1.0, 2.0]))


def test_gather_scatter_and_all_to_all_on_one_rank_copy() -> None:
    tensor = torch.tensor([1.0, 2.0])
    for move in (
        lambda out: dist.all_gather([out], tensor),
        lambda out: dist.gather(tensor, [out]),
        lambda out: dist.scatter(out, [tensor]),
        lambda out: dist.all_to_all([out], [tensor]),
    ):
        out = torch.zeros(2)
        move(out)
        assert torch.equal(out, tensor)
    dist.broadcast(tensor)
    dist.barrier()
    assert dist.broadcast_object({"a": [1, None]}) == {"a": [1, None]}
    assert dist.all_gather_object(3) == [3]
    with dist.main_first():
        pass


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op="mean"), "world.mean-of-integers"),
        (lambda: dist.all_reduce(torch.ones(2), op="median"), "world.bad-op"),
        (lambda: dist.broadcast(torch.ones(2), src=1), "world.bad-rank"),
        (lambda: dist.all_gather([], torch.ones(2)), "world.bad-list"),
        (lambda: dist.scatter(torch.ones(2)), "world.bad-list"),
        (lambda: dist.broadcast_object(object()), "world.not-json"),
        (lambda: dist.all_reduce(3.0), "world.not-a-tensor"),
    ],
)
def test_bad_calls_have_codes(call: object, code: str) -> None:
    with pytest.raises(WorldError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.code == code
