"""A report is shown, kept with the logs, and counted in the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.launch import LaunchSpec
from paceline.diagnose.evidence import GroupProgress, Operation, RankEvidence, StackFrame
from paceline.diagnose.patience import Standstill
from paceline.launcher.local.hang_report import HangPolicy
from paceline.launcher.local.rank_logs import RankLogs
from paceline.launcher.local.start import LocalStart, NodeAssignment
from paceline.run import ledger
from paceline.run.folder import RunFolder

STACK = (StackFrame("read_image", "/home/me/data.py", 88),)
RANKS = [RankEvidence(rank, pid=1 + rank, stack=STACK) for rank in (0, 1)]
FOUND = Standstill(2.3, 2.0, "20 × the median step of 0.1 s", "training")


def policy(folder: Path, generation: int = 0, **options: Any) -> HangPolicy:
    run = RunFolder(folder)
    run.logs.mkdir(exist_ok=True)
    node = NodeAssignment(ranks=2, world=2)
    return HangPolicy(LocalStart(LaunchSpec(**options), RankLogs(run, run), node, generation))


def in_barrier(rank: int) -> RankEvidence:
    group, pending = GroupProgress("0", "", (0, 1), entered=4, left=3), (Operation("0", 4, "barrier"),)
    return RankEvidence(rank, pid=1 + rank, groups=(group,), pending=pending, stack=STACK)


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads(RunFolder(folder).hang.read_text()))


def test_every_report_of_a_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for generation in range(3):
        told = policy(tmp_path, generation)
        told.standstill(FOUND, RANKS)
        told.standstill(FOUND._replace(lasts=True), RANKS)  # once is enough
        told.continued(4.0)
    said = capsys.readouterr().err
    assert said.count("data.py:88") >= 3 and said.count("progress again, after 4.0 s") == 3
    assert "\nwarning: " in said and "(limit 2.0 s in training: 20 × the median step of 0.1 s)\n  still waiting" in said
    last = report(tmp_path)
    assert (last["generation"], last["kind"], last["seconds"], last["limit"]) == (2, "stands-still", 2.3, 2.0)
    assert [each["generation"] for each in last["earlier"]] == [1, 0]
    assert [RankEvidence.from_json(each) for each in last["evidence"]] == RANKS
    noted = [(event["event"], event["seconds"]) for event in ledger.events(RunFolder(tmp_path))]
    assert noted == [("hang", 2.3), ("continued", 1.7)] * 3


@pytest.mark.parametrize(
    ("options", "said", "order"),
    [
        ({}, "", None),
        ({"on_hang": "stop", "max_restarts": 3}, "stopping the run (--on-hang stop)", 0),
        ({"on_hang": "restart", "max_restarts": 1}, "for a restart", 0),
        ({"on_hang": "restart"}, "stopping the run (--on-hang restart, but --max-restarts is 0)", 0),
        ({"on_hang": "restart", "max_restarts": 1, "generation": 1}, "but restarts are used up)", 0),
    ],
)
def test_the_policy_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], said: str, order: int | None
) -> None:
    told = policy(tmp_path, **options)
    assert told.order() is None
    told.standstill(FOUND, RANKS)  # they may only be slow
    assert "  still waiting" in capsys.readouterr().err and told.order() is None
    told.standstill(FOUND._replace(seconds=21.0, lasts=True), RANKS)
    assert said in capsys.readouterr().err and told.order() == order
    assert (told.hang is not None) == (order == 0)
    told.standstill(FOUND._replace(seconds=41.0, lasts=True), RANKS)  # while they are being stopped
    assert capsys.readouterr().err == ""
    told.continued(42.0)
    assert [event["event"] for event in ledger.events(RunFolder(tmp_path))] == ["hang", "continued"]


def test_ranks_that_will_never_continue_are_stopped_at_once(tmp_path: Path) -> None:
    told = policy(tmp_path, on_hang="stop")
    told.standstill(FOUND, [RankEvidence(0, ended="has ended: its code returned"), in_barrier(1)])
    assert told.hang is not None and told.hang.kind == "left" and told.order() == 0


def test_logs_that_cannot_be_written_do_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = policy(tmp_path)
    RunFolder(tmp_path).hang.mkdir()
    told.standstill(FOUND, RANKS)
    assert "data.py:88" in capsys.readouterr().err
