from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from paceline import dist
from paceline.errors import WorldError
from paceline.testing import ranks


def caught(call: Any) -> str:
    with pytest.raises(WorldError) as error:
        call()
    assert error.value.code == "world.different-collectives"
    return str(error.value)


@ranks(3)
def test_collectives_of_torch_are_checked_in_debug_mode() -> None:
    tensor = torch.ones(2, 2)
    torch_dist.all_reduce(tensor)
    assert tensor.sum() == 12
    sent = tensor.double() if dist.rank() == 1 else tensor
    text, line = caught(lambda: torch_dist.broadcast(sent, src=1)), sys._getframe().f_lineno
    where = f"tests/unit/runtime/test_collective_calls.py:{line}"
    assert f"ranks 0, 2: broadcast((2, 2), float32, src=1) at {where}" in text
    assert f"rank 1: broadcast((2, 2), float64, src=1) at {where}" in text
    roots = caught(lambda: torch_dist.reduce(tensor, dst=dist.rank() // 2))
    assert "ranks 0, 1: reduce((2, 2), float32, sum dst=0)" in roots and "dst=1" in roots
    work = torch_dist.all_reduce(tensor, async_op=True)  # after errors that were handled
    assert work is not None
    work.wait()


@ranks(3)
def test_calls_in_different_groups_are_found_while_ranks_wait() -> None:
    pair = torch_dist.new_group([0, 1])
    text = caught(lambda: torch_dist.barrier(pair if dist.rank() == 0 else None))
    assert "rank 0: barrier() at" in text and "in group 1 of ranks 0, 1" in text and "ranks 1, 2: barrier() at" in text


@ranks(2)
def test_gradients_that_ddp_reduces_are_checked() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True)
    loss = model(torch.ones(1, 2)).sum()
    text = caught(loss.backward if dist.is_main() else dist.barrier)
    assert "rank 0: all_reduce((6,), float32, sum) at" in text and "rank 1: barrier() at" in text
