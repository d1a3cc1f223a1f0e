"""What the launcher hands over about hangs, and when: its clock, and the pages of the ranks, are those of the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.launch import LaunchSpec
from paceline.diagnose.hang.evidence import GroupProgress, Operation, RankEvidence, StackFrame, ranks_from_json
from paceline.diagnose.hang.process_stacks import ProcessStacks
from paceline.diagnose.hang.progress_limits import LASTING, NoProgress
from paceline.launcher.local import hang_detector
from paceline.launcher.local.hang_detector import HangDetector, HangPolicy
from paceline.launcher.local.start import AgentObserver, LocalStart, NodeAssignment, RankLogs
from paceline.run import heartbeat, ledger
from paceline.run.folder import RunFolder
from paceline.run.heartbeat import RankPage, RankPageWriter, pack_ranks

TICK = 0.25
LIMIT = 2.0  # of training with short steps
WAITS = "torch.distributed.all_reduce() at train.py:9, waiting for other ranks"
READS = "trainer.train() at train.py:7, in read_image() at data.py:88, reading a batch"
COMPUTES = "callback() at train.py:11"
DEBUGGED = "callback() at train.py:11, in a debugger"
JUST_NOW = 1e12  # pages that are never old: the threads of these ranks run
# The process of a rank, for its stack.
PROGRAM = """
import time
def stand():
    print(flush=True)
    input()
stand()
while time.process_time() < 1.0:
    pass
stand()
"""


class Heard(AgentObserver):
    def __init__(self) -> None:
        self.reports: list[tuple[NoProgress, Sequence[RankEvidence]]] = []
        self.answers: list[tuple[Sequence[RankEvidence], float, float]] = []
        self.ended: list[float] = []
        self.asks = False

    def standstill(self, found: NoProgress, ranks: Sequence[RankEvidence]) -> None:
        self.reports.append((found, ranks))

    def continued(self, seconds: float) -> None:
        self.ended.append(seconds)

    def wants_evidence(self) -> bool:
        asks, self.asks = self.asks, False
        return asks

    def evidence(self, ranks: Sequence[RankEvidence], still: float, limit: float) -> None:
        self.answers.append((ranks, still, limit))


class Node:
    """Two ranks that do what a test says, and their detector."""

    def __init__(self, folder: RunFolder, pids: Sequence[int]) -> None:
        folder.logs.mkdir()
        self.now, self.heard, self.looks, self.ranks = 1000.0, Heard(), 0, [0, 1]
        self.at_look: Callable[[int], object] = lambda number: None
        self.beats = [heartbeat.open_writer(folder.heartbeat(rank)) for rank in range(2)]
        self._pages = [RankPageWriter(folder.page(rank)) for rank in range(2)]
        group = {"name": "0", "label": "", "ranks": pack_ranks(range(2)), "entered": 7, "left": 7}
        self._values: list[dict[str, Any]] = [
            {"time": JUST_NOW, "pid": pid, "micros": 0, "groups": [group], "pending": [], "place": ""} for pid in pids
        ]
        self.detector = HangDetector(folder, dict(enumerate(pids)), self._running, 0, clock=lambda: self.now)
        for _ in range(10):
            self.step()

    def _running(self) -> list[int]:
        """Asked for at the beginning of each look."""
        self.looks += 1
        self.at_look(self.looks)
        return self.ranks

    def write(self, rank: int, **values: Any) -> None:
        self._values[rank] |= values
        self._pages[rank].write(self._values[rank])

    def move(self, rank: int, **values: Any) -> None:
        self.write(rank, micros=self._values[rank]["micros"] + 1, **values)

    def step(self) -> None:
        """Several in each look, so that their limit is the least one."""
        for rank, beat in enumerate(self.beats):
            beat.at(beat.last.step + 5)
            self.move(rank, place="")
        self.wait(TICK)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            self.look()

    def look(self) -> None:
        self.detector.tick()
        self.detector.report_to(self.heard)

    def in_collective(self, rank: int, named: bool = True) -> None:
        group = {**self._values[rank]["groups"][0], "entered": 8}
        operation = {"group": "0", "number": 8, "name": "all_reduce", "sizes": [[3]], "dtypes": ["Float"]}
        self.write(rank, place=WAITS, groups=[group], pending=[operation] if named else [])


@pytest.fixture
def two_processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-S", "-c", PROGRAM]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            wait_for(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def node(tmp_path: Path, two_processes: list[subprocess.Popen[bytes]]) -> Node:
    return Node(RunFolder(tmp_path), [process.pid for process in two_processes])


def wait_for(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None and process.stdout.readline() == b"\n"


def test_a_rank_that_others_wait_for_is_reported_once_with_the_evidence_of_all(node: Node) -> None:
    node.in_collective(0)
    node.write(1, place=COMPUTES)
    node.wait(LIMIT)
    assert not node.heard.reports
    node.wait(2 * TICK)
    [(found, ranks)] = node.heard.reports
    assert (found.phase, found.limit, found.lasts) == ("training", LIMIT, False) and LIMIT < found.seconds <= 2.5
    assert [(each.rank, each.node, each.state, each.step, each.place) for each in ranks] == [
        (0, 0, "running", 51, WAITS), (1, 0, "running", 51, COMPUTES),
    ]  # fmt: skip
    assert ranks[0].pending == (Operation("0", 8, "all_reduce", ((3,),), ("Float",)),)
    assert [[frame.function for frame in each.stack] for each in ranks] == [["stand", "<module>"]] * 2
    node.wait(LASTING * LIMIT - LIMIT - 2 * TICK)
    assert len(node.heard.reports) == 1 and not node.heard.ended


def test_a_standstill_is_reported_again_while_it_lasts_and_its_end_is_told(node: Node) -> None:
    node.in_collective(0)
    node.wait(LASTING * LIMIT + TICK)
    assert [found.lasts for found, _ in node.heard.reports] == [False, True] and not node.heard.ended
    node.step()
    node.step()
    assert node.heard.ended == [pytest.approx(LASTING * LIMIT, abs=2 * TICK)]
    assert len(node.heard.reports) == 2


def test_ranks_that_are_all_busy_or_evaluate_do_not_hang(node: Node) -> None:
    for rank in range(2):
        node.move(rank, place=COMPUTES)
    node.wait(25 * LIMIT)
    node.step()
    for rank, beat in enumerate(node.beats):
        beat.enter("evaluating")
        node.write(rank, place=READS)
    node.wait(25.0)
    node.step()
    assert not node.heard.reports and not node.heard.ended


def test_a_job_that_was_stopped_for_longer_than_the_limit_does_not_hang(node: Node) -> None:
    """The launcher is stopped together with its ranks."""
    node.in_collective(0)
    node.now += 3600.0
    node.look()
    node.step()
    assert not node.heard.reports and not node.heard.ended


def test_a_rank_that_moves_while_evidence_is_collected_does_not_hang(node: Node) -> None:
    node.in_collective(0)
    node.wait(LIMIT)
    last = node.looks

    def move(look: int) -> None:
        if look == last + 2:
            node.move(1)

    node.at_look = move
    node.wait(TICK)
    assert node.looks == last + 2 and not node.heard.reports
    node.wait(LIMIT + 2 * TICK)
    assert len(node.heard.reports) == 1


def test_a_report_waits_for_the_names_of_operations(node: Node) -> None:
    """A rank finds them out by itself, which on a machine under load takes a moment."""
    node.in_collective(0, named=False)
    node.wait(LIMIT + 3 * TICK)
    assert not node.heard.reports
    node.in_collective(0)
    node.wait(TICK)
    [(found, ranks)] = node.heard.reports
    assert ranks[0].pending and found.seconds > LIMIT + 2 * TICK


def test_a_report_does_not_wait_for_names_for_long(node: Node) -> None:
    node.in_collective(0, named=False)
    node.wait(LIMIT + 2.0 + 2 * TICK)
    [(_, ranks)] = node.heard.reports
    assert not ranks[0].pending


def test_whoever_asks_gets_evidence_of_ranks_that_are_within_their_limit(node: Node) -> None:
    node.in_collective(0)
    node.wait(1.0)
    node.heard.asks = True
    node.look()
    node.look()
    [(ranks, still, limit)] = node.heard.answers
    assert [each.rank for each in ranks] == [0, 1] and 0.5 <= still <= 1.0 and limit == LIMIT
    assert not node.heard.reports


def test_ranks_that_are_debugged_are_left_alone(node: Node) -> None:
    node.in_collective(0)
    node.write(1, place=DEBUGGED)
    node.wait(100.0)
    assert not node.heard.reports


def test_an_error_ends_the_watch_and_not_the_run(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(look: int) -> None:
        raise ValueError("a page from the future")

    node.at_look = fail
    node.detector.start()
    node.detector.stop()
    node.detector.report_to(node.heard)
    said = capsys.readouterr().err
    assert said.count("hangs of this node are no longer detected (ValueError: a page from the future)") == 1


def test_a_rank_that_is_idle_when_the_others_have_ended_is_reported(node: Node) -> None:
    for rank, beat in enumerate(node.beats):
        beat.enter("done")
        node.move(rank)
    node.wait(1000.0)
    assert not node.heard.reports  # no rank has ended, and the user's code may do anything
    node.ranks = [1]
    node.wait(60.0)
    assert not node.heard.reports
    node.wait(2 * TICK)
    [(found, ranks)] = node.heard.reports
    assert (found.phase, found.limit) == ("exit", 60.0)
    hang = hang_detector._judge(ranks, found)
    assert (hang.kind, hang.ranks) == ("exit", (0, 1))  # the process of rank 0 is still there in this test


def test_a_rank_that_computes_when_the_others_have_ended_is_not_reported(
    node: Node, two_processes: list[subprocess.Popen[bytes]]
) -> None:
    for beat in node.beats:
        beat.enter("done")
    node.ranks = [0]
    node.wait(50.0)
    assert two_processes[0].stdin is not None
    two_processes[0].stdin.write(b"\n")
    two_processes[0].stdin.flush()
    wait_for(two_processes[0])  # it has computed for a second
    node.wait(50.0)
    assert not node.heard.reports


def test_a_rank_that_trains_is_waited_for_by_ranks_that_have_ended(node: Node) -> None:
    node.beats[1].enter("returned")
    node.write(1, ended="has ended: its code returned")
    for _ in range(1000):
        node.move(0)
        node.wait(TICK)
    assert not node.heard.reports


def test_ranks_whose_code_has_returned_are_reported_if_none_exits(node: Node) -> None:
    for rank, beat in enumerate(node.beats):
        beat.enter("returned")
        node.write(rank, ended="has ended: its code returned, and it waits for the thread Thread-1")
    node.wait(60.0 + 2 * TICK)
    [(found, ranks)] = node.heard.reports
    text = hang_detector._judge(ranks, found).text
    assert text.startswith("ranks 0 and 1 have not exited, idle for 1 min 0 s: they are ")
    assert "rank 1 has ended: its code returned, and it waits for the thread Thread-1" in text


def test_a_rank_is_reported_when_those_of_other_nodes_have_ended(node: Node) -> None:
    for rank, beat in enumerate(node.beats):
        beat.enter("done")
        node.move(rank)
    node.wait(100.0)
    assert not node.heard.reports
    node.heard.others_ended = True
    node.wait(61.0)
    [(found, _)] = node.heard.reports
    assert found.phase == "exit"


STACK = (StackFrame("read_image", "/home/me/data.py", 88),)
RANKS = [RankEvidence(rank, pid=1 + rank, stack=STACK) for rank in (0, 1)]
FOUND = NoProgress(2.3, 2.0, "20 × the median step of 0.1 s", "training")


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
    assert ranks_from_json(last["evidence"]) == RANKS
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


def test_a_rank_whose_thread_waits_for_a_store_does_not_seem_to_hold_the_gil() -> None:
    page = RankPage(time=100.0, pid=7)
    assert hang_detector._from_page(page, 7, ProcessStacks(), 103.0)["silent"] == 3.0
    assert hang_detector._from_page(replace(page, waits=True), 7, ProcessStacks(), 103.0)["silent"] == 0.0
