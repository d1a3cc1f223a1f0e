"""What the launcher reads about ranks that stand still: collectives, stacks, process states, workers."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn

from observed import Pages, all_stand_still, observe
from paceline import dist
from paceline.diagnose.hang.evidence import Operation, RankEvidence, ranks_from_json
from paceline.diagnose.hang.process_stacks import state_of
from paceline.run.heartbeat import RankPage


def sleep() -> None:
    time.sleep(600)


def compute() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def functions(evidence: RankEvidence) -> list[str]:
    return [frame.function for frame in evidence.stack]


def line_of(evidence: RankEvidence) -> str:
    frame = next(frame for frame in evidence.stack if frame.file == __file__)
    return Path(__file__).read_text().splitlines()[frame.line - 1].strip()


BLOCKED = [sleep, compute, hold_the_gil, stop, wait_for_a_lock]


def test_ranks_that_do_not_come_and_one_that_waits(tmp_path: Path) -> None:
    def body() -> None:
        dist.barrier()
        for _ in range(4):
            torch_dist.all_reduce(torch.ones(2, 3))
        if dist.rank() > 0:
            BLOCKED[dist.rank() - 1]()
        torch_dist.broadcast(torch.ones(5, dtype=torch.float64), 0)

    def can_write(rank: int) -> bool:
        return BLOCKED[rank - 1] not in (hold_the_gil, stop)

    def ready(pages: Pages) -> bool:
        if len(pages) <= len(BLOCKED):
            return False
        blocked = (
            bool(pages[rank].place) if can_write(rank) else silent(pages[rank]) > 1.2 for rank in range(1, len(pages))
        )
        return all(blocked) and bool(pages[0].pending)

    def silent(page: RankPage) -> float:
        return time.monotonic() - page.time

    def enough(found: Sequence[RankEvidence]) -> bool:
        """On a machine under load, the page of a rank that can write it may be old for a moment, and a rank that has
        not moved for a while may be on its way."""
        written = all(each.silent <= 1.0 for each in found[1:] if can_write(each.rank))
        there = [functions(each)[:1] for each in found[1:]] == [[blocked.__name__] for blocked in BLOCKED]
        return written and there and [each.name for each in found[0].pending] == ["broadcast"]

    waits, *others = observe(body, len(BLOCKED) + 1, tmp_path, ready, enough).evidence
    number = waits.groups[0].entered
    assert waits.pending == (Operation("0", number, "broadcast", ((5,),), ("Double",)),)
    assert (waits.groups[0].ranks, waits.groups[0].left) == (tuple(range(6)), number - 1)
    assert line_of(waits).startswith("torch_dist.broadcast(")
    for evidence, blocked in zip(others, BLOCKED, strict=True):
        assert functions(evidence) == [blocked.__name__, "body", "run", "_call", "<lambda>"]
        assert evidence.state == ("stopped" if blocked is stop else "running")
        assert (evidence.silent > 1.0) == (not can_write(evidence.rank))
        assert evidence.silent > 1.0 or (evidence.groups[0].entered, evidence.pending) == (number - 1, ())
        assert evidence.missing == ""
        assert ranks_from_json([evidence.to_json()]) == [evidence]


def test_the_backward_of_ddp(tmp_path: Path) -> None:
    """Its collectives are called from C++."""

    def body() -> None:
        dist.barrier()
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        for _ in range(2):  # buckets are rebuilt in the second forward
            model(torch.ones(2, 8)).sum().backward()
        if dist.rank() == 1:
            sleep()
        model(torch.ones(2, 8)).sum().backward()

    waits, blocks = observe(body, 2, tmp_path, lambda pages: all_stand_still(pages, 2) and pages[0].pending).evidence
    (pending,) = waits.pending
    assert (pending.name, pending.sizes, pending.number) == ("all_reduce", ((72,),), blocks.groups[0].entered + 1)
    assert "backward" in functions(waits)


def test_a_gather_of_fsdp(tmp_path: Path) -> None:
    def body() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.barrier()
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        model(torch.ones(2, 8)).sum().backward()
        if dist.rank() == 1:
            sleep()
        model(torch.ones(2, 8)).sum().backward()

    waits, blocks = observe(body, 2, tmp_path, lambda pages: all_stand_still(pages, 2) and pages[0].pending).evidence
    group = next(each for each in waits.groups if each.name == waits.pending[0].group)
    other = next(each for each in blocks.groups if each.name == group.name)
    assert "gather" in waits.pending[0].name
    assert (group.ranks, waits.pending[0].number) == ((0, 1), other.entered + 1)


def test_the_receive_of_a_pipeline(tmp_path: Path) -> None:
    """gloo records no receives; its count changes, and the stack tells the rest."""

    def body() -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        dist.barrier()
        rank = dist.rank()
        stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).sum())
        batch = torch.ones(4, 4)
        for step in range(2):
            if rank == 0 and step == 1:
                sleep()
            schedule.step(batch) if rank == 0 else schedule.step(target=batch)

    blocks, waits = observe(body, 2, tmp_path).evidence
    assert functions(blocks)[0] == "sleep"
    assert waits.stack[0].file.endswith("torch/distributed/pipelining/schedules.py")
    assert [group.entered for group in waits.groups] == [group.entered for group in blocks.groups]


class Samples(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        if index == 6:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index

    def __len__(self) -> int:
        return 8


def test_a_worker_that_is_stopped(tmp_path: Path) -> None:
    def body() -> None:
        for _ in torch.utils.data.DataLoader(Samples(), num_workers=2):
            pass

    def ready(pages: Pages) -> bool:
        workers = [int(pid) for pid in Path(f"/proc/{pages[0].pid}/task/{pages[0].pid}/children").read_text().split()]
        return bool(pages[0].place) and any(state_of(pid) == "stopped" for pid in workers)

    (rank,) = observe(body, 1, tmp_path, ready).evidence
    assert sorted(worker.state for worker in rank.workers) == ["running", "stopped"]
    (stopped,) = [worker for worker in rank.workers if worker.state == "stopped"]
    assert stopped.stack[0].function == "__getitem__"
    assert "_try_get_data" in functions(rank)
    assert not any(frame.function == "body" for frame in stopped.stack)  # a frame of the rank that forked it
