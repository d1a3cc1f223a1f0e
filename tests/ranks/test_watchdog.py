"""The launcher sees that its ranks hang, says why, and does what `--on-hang` says.

The launches of all tests run at the same time, because most of what they do is to wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny  # noqa: F401  # once, before launchers are forked
from nodes import Launcher, ended, eventually, launchers, reserve_ports
from paceline.launcher.local import agent as _agent  # noqa: F401
from paceline.run import ledger
from paceline.run.folder import RunFolder

# The last step but one is the first that has a limit of two seconds: there is a history of three steps by then. After a
# restart there are too few steps for one, so however slow the machine is, the ranks train to the end.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import tiny, torch

deed, rank, start = sys.argv[1], int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
trainer = tiny.classifier_trainer(run=None, quiet=True, save_every=4, checkpoint={"background": False})

def act(*_):
    if rank == 1 and start == 0 and trainer.step_count == 6:
        if deed == "wait":
            Path("go").read_text()  # a pipe: it waits here
        else:
            if deed == "deaf barrier":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            torch.distributed.barrier()  # the other one does not come

trainer.model.register_forward_pre_hook(act)
trainer.train(tiny.blobs(160), max_steps=8)
if deed == "wait" and rank == 1:
    Path("end").read_text()  # the launcher looks a few times a second
"""


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), start=1) if words in line)


WAITS_AT, BARRIER_AT = line_of("a pipe"), line_of("barrier()")


@dataclass
class Job:
    folder: Path
    launchers: list[Launcher]

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "script")

    def said(self) -> str:
        return "\n".join(each.said for each in self.launchers)

    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.run.hang.read_text()))

    def events(self) -> list[str]:
        return [event["event"] for event in ledger.events(self.run)]


COMMANDS: dict[str, list[list[str]]] = {
    "report": [["-n", "2", "script.py", "wait"]],
    "restart": [["-n", "2", "--on-hang", "restart", "--max-restarts", "1", "script.py", "barrier"]],
    "stop": [["-n", "2", "--on-hang", "stop", "--max-restarts", "1", "script.py", "deaf barrier"]],
    "nodes": [["-n", "1", "--node-rank", str(node), "--on-hang", "stop", "script.py", "barrier"] for node in (0, 1)],
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    started = {}
    with ExitStack() as stack:
        for name, commands in COMMANDS.items():
            folder = tmp_path_factory.mktemp(name)
            (folder / "script.py").write_text(SCRIPT)
            for pipe in ("go", "end"):
                os.mkfifo(folder / pipe)
            launch = stack.enter_context(launchers(folder))
            meet = ("--nodes", "2", "--master", f"127.0.0.1:{reserve_ports()}") if len(commands) > 1 else ()
            started[name] = Job(folder, [launch("launch", *meet, *command) for command in commands])
        yield started


def test_a_rank_that_others_wait_for_is_named_with_its_line(jobs: dict[str, Job]) -> None:
    job = jobs["report"]
    [launcher] = job.launchers
    report = eventually(lambda: reported(job, launcher))
    (job.folder / "go").write_text("")
    eventually(lambda: launcher.says("progress again"))
    (job.folder / "end").write_text("")
    assert launcher.end() == 0, job.said()
    assert (report["kind"], report["ranks"], report["phase"]) == ("missing", [1], "training"), job.said()
    assert report["limit"] <= report["seconds"]
    assert f"act() at script.py:{WAITS_AT}" in report["lines"]["1"] and "script.py:" in report["lines"]["0"]
    assert report["text"].splitlines()[0] in launcher.said and f"script.py:{WAITS_AT}" in launcher.said
    assert "no progress for" in launcher.said
    assert [event for event in job.events() if event in ("hang", "continued")][-2:] == ["hang", "continued"]


def reported(job: Job, launcher: Launcher) -> dict[str, Any] | None:
    """The report about the rank that waits. On a machine under load the first one may not have the operation yet; it is
    repeated while the hang lasts."""
    assert launcher.status is None, job.said()
    report = job.report() if job.run.hang.exists() else {}
    return report if report.get("operation") and f"script.py:{WAITS_AT}" in report["text"] else None


def test_restart_trains_on_to_the_end(jobs: dict[str, Job]) -> None:
    job = jobs["restart"]
    assert ended(*job.launchers) == [0], job.said()
    assert "stopping the ranks for a restart" in job.said()
    assert "restart 1 of 1: " in job.said() and "(hang)" in job.said()
    steps = [json.loads(line)["step"] for line in job.run.metrics.read_text().splitlines()]
    assert steps[-1] == 8 and job.report()["generation"] == 0
    assert {"hang", "failed"} <= set(job.events())


def test_stop_ends_the_run_with_the_report_as_its_cause(jobs: dict[str, Job]) -> None:
    """Also a rank that ignores SIGTERM."""
    job = jobs["stop"]
    assert ended(*job.launchers) == [79], job.said()
    assert "ranks made no progress" in job.said() and f"script.py:{BARRIER_AT}" in job.report()["text"]
    assert job.said().count(job.report()["text"]) == 1, job.said()  # at the end, as the cause
    assert "restart 1" not in job.said()


def test_two_nodes_give_one_report_with_the_ranks_of_both(jobs: dict[str, Job]) -> None:
    job = jobs["nodes"]
    assert ended(*job.launchers) == [79, 79], job.said()
    report = job.report()
    assert report["kind"] in ("mismatch", "order"), job.said()
    assert [(each["rank"], each["node"]) for each in report["evidence"]] == [(0, 0), (1, 1)]
    assert f"script.py:{BARRIER_AT}" in report["lines"]["1"] and "script.py:" in report["lines"]["0"]
    first, second = job.launchers
    assert report["text"].splitlines()[0] in first.said and report["text"].splitlines()[0] in second.said
    assert first.said.count("no progress for") == second.said.count("no progress for") > 0
