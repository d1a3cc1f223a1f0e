"""The thread that writes the page of a rank: in any script, and never in the way."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

import forked
import paceline
from observed import Pages, observe
from paceline import dist
from paceline.diagnose.hang import flight_recorder, rank_monitor
from paceline.diagnose.hang.process_stacks import state_of
from paceline.run import heartbeat
from paceline.run.folder import RunFolder
from paceline.runtime import environment

PLAIN = """
import os, sys, threading, time
file = os.environ["PACELINE_PROGRESS"] + "/logs/page-" + os.environ["RANK"]
while "time" not in open(file, errors="replace").read():
    time.sleep(0.01)
pid = os.fork()
if pid == 0:
    print("child", [thread.name for thread in threading.enumerate()], flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("torch", "torch" in sys.modules)
print("rank", [thread.name for thread in threading.enumerate()])
"""


@pytest.mark.parametrize("options", [(), ("--fresh",)])
def test_a_script_that_imports_nothing_has_a_page_and_its_children_do_not_write_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    done = forked.paceline("launch", "-n", "1", *options, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch {not options}" in done.stdout
    assert "child ['MainThread']" in done.stdout
    assert "rank ['MainThread', 'paceline-rank-monitor']" in done.stdout


def test_a_process_that_runs_another_program_has_no_page(tmp_path: Path) -> None:
    """Otherwise it would seem to hold the GIL."""
    program = """
import os; from pathlib import Path; from paceline.run import heartbeat; from paceline.run.folder import RunFolder
print("pid of the page:", heartbeat.read_pages(RunFolder(Path(os.environ["PACELINE_PROGRESS"])))[0].pid)
"""
    done = forked.paceline("launch", "-n", "1", "--no-python", sys.executable, "-c", program, cwd=tmp_path)
    assert done.returncode == 0 and "pid of the page: 0\n" in done.stdout, done.stdout + done.stderr


def test_a_rank_whose_code_has_returned_says_so(tmp_path: Path) -> None:
    def body() -> None:
        dist.barrier()
        if dist.rank() == 0:
            threading.Thread(target=time.sleep, args=(600,), name="uploader").start()  # the process waits for it
        else:
            time.sleep(600)

    first, _ = observe(body, 2, tmp_path, lambda pages: len(pages) == 2 and bool(pages[0].ended)).evidence
    assert first.ended == "has ended: its code returned, and it waits for the thread uploader"


def test_groups_come_and_go(tmp_path: Path) -> None:
    """Names are used again; numbers must be those of the group that exists now."""

    def body() -> None:
        import torch
        import torch.distributed as torch_dist

        torch_dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{dist_rank()}", rank=0, world_size=1)
        torch_dist.all_reduce(torch.ones(1))
        torch_dist.destroy_process_group()
        for number in range(3):
            torch_dist.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/store-{number}", rank=dist_rank(), world_size=2
            )
            other = torch_dist.new_group([0, 1], group_desc="mesh_shard")
            alone = [torch_dist.new_group([rank]) for rank in range(2)]
            for _ in range(number + 1):
                torch_dist.all_reduce(torch.ones(1), group=other)
            torch_dist.all_reduce(torch.ones(1), group=alone[dist_rank()])
            if number < 2:
                torch_dist.destroy_process_group()
        time.sleep(600)

    def dist_rank() -> int:
        return int(os.environ["RANK"])

    for evidence in observe(body, 2, tmp_path).evidence:
        assert [(group.label, group.ranks, group.entered, group.left) for group in evidence.groups] == [
            ("", (0, 1), 0, 0), ("shard", (0, 1), 3, 3), ("unnamed", (evidence.rank,), 1, 1),
        ]  # fmt: skip


def test_without_a_flight_recorder_sequence_numbers_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_RECORDERS", {"_dump_of_another_torch": ""})

    def body() -> None:
        import torch
        import torch.distributed as torch_dist

        dist.barrier()
        if dist.rank() == 0:
            torch_dist.all_reduce(torch.ones(1))
        else:
            time.sleep(600)

    seen = observe(body, 2, tmp_path)
    waits, blocks = seen.evidence
    assert waits.groups[0].entered == blocks.groups[0].entered + 1
    assert seen.pages[0].source == "sequence numbers"
    assert waits.missing == "names of pending operations: this torch has no _dump_of_another_torch"


def test_the_recorder_is_not_read_while_a_group_is_created() -> None:
    """torch's functions that dump it take no lock."""

    def body() -> list[int]:
        import torch.distributed as torch_dist
        from torch._C import _distributed_c10d

        dist.barrier()
        dumps = []
        counted = _distributed_c10d._dump_fr_trace_json
        _distributed_c10d._dump_fr_trace_json = lambda *args: dumps.append(1) or counted(*args)
        watch = rank_monitor._monitor
        assert watch is not None
        watch._stop.set()
        watch._thread.join()

        def tick() -> int:
            dumps.clear()
            thread = threading.Thread(target=watch.tick)
            thread.start()
            thread.join()
            return len(dumps)

        numbers = [tick()]

        class Map(dict):  # type: ignore[type-arg]
            def __setitem__(self, key: object, value: object) -> None:
                numbers.append(tick())
                super().__setitem__(key, value)

        torch_dist.distributed_c10d._pg_map = Map(torch_dist.distributed_c10d._pg_map)
        torch_dist.new_group([dist.rank()], use_local_synchronization=True)
        return [*numbers, tick()]

    before, *during, after = paceline.launch(body, ranks=2)
    assert before > 0 and after > 0 and during == [0]


def test_no_page_is_written_after_the_end() -> None:
    def body() -> str:
        folder = environment.log_folder()
        assert folder is not None
        dist.barrier()
        return str(folder)

    # The temporary folder of a launch is removed at its end; nobody writes to it again.
    folder = RunFolder(Path(paceline.launch(body, ranks=2)))
    assert not folder.path.exists()
    assert heartbeat.read_pages(folder) == {}


def test_a_program_that_replaces_its_rank_is_not_taken_for_one_that_holds_the_gil(tmp_path: Path) -> None:
    def body() -> None:
        if dist.rank() == 0:
            os.execvp("sleep", ["sleep", "600"])
        time.sleep(600)

    def ready(pages: Pages) -> bool:
        return len(pages) == 2 and Path(f"/proc/{pages[0].pid}/comm").read_text() == "sleep\n" and bool(pages[1].place)

    program, other = observe(body, 2, tmp_path, ready).evidence
    assert (program.silent, program.stack, program.groups, program.state) == (0.0, (), (), "running")
    assert program.missing == "its stack: not a Python program; its collectives: it has no thread that counts them"
    assert other.missing == ""


def test_a_rank_that_has_exited_is_told_from_one_that_runs(tmp_path: Path) -> None:
    def body() -> None:
        dist.barrier()
        if dist.rank() == 1:
            time.sleep(600)

    def ready(pages: Pages) -> bool:
        return len(pages) == 2 and state_of(pages[0].pid) == "exited"

    first, _ = observe(body, 2, tmp_path, ready).evidence
    assert (first.state, first.ended, first.silent) == ("exited", "has ended: its code returned", 0.0)
