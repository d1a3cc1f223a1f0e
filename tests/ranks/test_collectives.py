from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp

import paceline
import paceline.dist as imported
from paceline import dist
from paceline.dist import all_reduce
from paceline.errors import WorldError
from worlds import ranks


def test_dist_can_be_imported_as_a_module() -> None:
    assert imported is dist and all_reduce is dist.all_reduce


@ranks(3)
def test_rows_of_all_ranks_are_gathered_with_their_gradients() -> None:
    count = [2, 0, 3][dist.rank()]
    own = (torch.arange(count * 2.0).reshape(count, 2) + 10 * dist.rank()).requires_grad_()
    rows = dist.all_gather_rows(own)
    assert rows[:, 0].tolist() == [0.0, 2.0, 20.0, 22.0, 24.0]
    (rows.square().sum() * (dist.rank() + 1)).backward()
    assert own.grad is not None and torch.equal(own.grad, 2 * own.detach() * 6)  # 1 + 2 + 3: the losses of all ranks
    assert not dist.all_gather_rows(own.detach()).requires_grad
    with pytest.raises(WorldError, match="only the first dim may differ"):
        dist.all_gather_rows(torch.zeros(2, 1 + dist.rank()))


@ranks(3)
def test_reductions_combine_over_ranks() -> None:
    own = dist.rank() + 1.0
    ops: list[tuple[Any, float]] = [("sum", 6.0), ("mean", 2.0), ("max", 3.0), ("min", 1.0), ("product", 6.0)]
    ops += [(ReduceOp.SUM, 6.0), (ReduceOp.AVG, 2.0), (ReduceOp.MAX, 3.0), (ReduceOp.PRODUCT, 6.0)]
    for op, expected in ops:
        for async_op in (False, True):
            tensor = torch.full((2,), own)
            work = dist.all_reduce(tensor, op=op, async_op=async_op)
            if async_op:
                work.wait()
            assert tensor.tolist() == [expected, expected], op
        tensor = torch.full((2,), own)
        dist.reduce(tensor, dst=1, op=op)
        if dist.rank() == 1:
            assert tensor.tolist() == [expected, expected], op
        received = torch.zeros(1)
        dist.reduce_scatter(received, [torch.tensor([own * (r + 1)]) for r in range(3)], op=op)
        if op == "sum":
            assert received.item() == 6.0 * own
        if op == "mean":
            assert received.item() == 2.0 * own


@ranks(3)
def test_moving_collectives_move() -> None:
    rank = dist.rank()
    own = torch.tensor([float(rank)])
    gathered = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(gathered, own)
    assert torch.cat(gathered).tolist() == [0.0, 1.0, 2.0]
    gathered = [torch.zeros(1) for _ in range(3)]
    dist.gather(own, gathered if rank == 2 else None, dst=2)
    assert torch.cat(gathered).tolist() == ([0.0, 1.0, 2.0] if rank == 2 else [0.0, 0.0, 0.0])
    received = torch.zeros(1)
    dist.scatter(received, [torch.tensor([10.0 * r]) for r in range(3)] if rank == 1 else None, src=1)
    assert received.item() == 10.0 * rank
    tensor = own.clone()
    dist.broadcast(tensor, src=2)
    assert tensor.item() == 2.0
    exchanged = [torch.zeros(1) for _ in range(3)]
    dist.all_to_all(exchanged, [torch.tensor([rank * 10.0 + r]) for r in range(3)])
    assert torch.cat(exchanged).tolist() == [rank + 0.0, rank + 10.0, rank + 20.0]


@ranks(2)
def test_objects_are_sent_as_json() -> None:
    value = dist.broadcast_object({"from": dist.rank(), "text": "é" * 50} if dist.is_main() else None)
    assert value == {"from": 0, "text": "é" * 50}
    assert dist.all_gather_object([dist.rank()] * (dist.rank() + 1)) == [[0], [1, 1]]
    for sizes in [(245, 246), (3, 246), (247, 0), (3000, 1)]:
        assert dist.all_gather_object("x" * sizes[dist.rank()]) == ["x" * size for size in sizes]


@ranks(3)
def test_groups_are_parts_of_the_world() -> None:
    pair = torch_dist.new_group([0, 2])
    if dist.rank() in (0, 2):
        tensor = torch.tensor([dist.rank() + 1.0])
        dist.all_reduce(tensor, op="mean", group=pair)
        assert tensor.item() == 2.0
        tensor = torch.tensor([float(dist.rank())])
        dist.broadcast(tensor, src=2, group=pair)
        assert tensor.item() == 2.0


@ranks(3)
def test_ranks_that_make_another_call_are_named() -> None:
    dist.debug(True)
    with pytest.raises(WorldError) as caught:
        if dist.rank() == 1:
            dist.all_reduce(torch.ones(3, dtype=torch.float64))
        else:
            dist.all_reduce(torch.ones(2))
    assert caught.value.code == "world.different-collectives"
    assert "ranks 0, 2: all_reduce((2,), float32, sum)" in str(caught.value)
    assert "rank 1: all_reduce((3,), float64, sum)" in str(caught.value)


@ranks(2)
def test_another_operation_is_named() -> None:
    dist.debug(True)
    with pytest.raises(WorldError, match="rank 1: barrier"):
        if dist.rank() == 1:
            dist.barrier()
        else:
            dist.broadcast(torch.ones(2))


def test_waiting_for_a_late_rank_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torch warns when a wait for the store times out."""

    def body() -> None:
        dist.barrier()
        if dist.rank() == 1:
            time.sleep(0.3)  # longer than the first look at the others
        dist.barrier()

    paceline.launch(body, ranks=2)
    assert capfd.readouterr().err == ""


@ranks(2)
def test_rank_0_runs_first_in_main_first(tmp_path: Path) -> None:
    path = tmp_path / "prepared"
    with dist.main_first():
        assert dist.is_main() or path.exists()
        path.touch()


@ranks(2)
def test_a_failure_of_main_reaches_the_others() -> None:
    code = None
    try:
        with dist.main_first():
            raise ValueError("no disk")
    except WorldError as error:
        code = error.code
    except ValueError:
        code = "own"
    assert code == ("own" if dist.is_main() else "world.main-failed")
