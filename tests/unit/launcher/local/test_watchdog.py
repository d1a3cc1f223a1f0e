"""What the launcher's watchdog hands over, and when: its clock, and the pages of the ranks, are those of the tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.diagnose.evidence import Operation, RankEvidence
from paceline.diagnose.patience import LASTING, Standstill
from paceline.launcher.local import hang_report
from paceline.launcher.local.start import AgentObserver
from paceline.launcher.local.watchdog import Watchdog
from paceline.run import heartbeat
from paceline.run.folder import RunFolder
from paceline.run.rank_page import RankPageWriter, pack_ranks

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
        self.reports: list[tuple[Standstill, Sequence[RankEvidence]]] = []
        self.answers: list[tuple[Sequence[RankEvidence], float, float]] = []
        self.ended: list[float] = []
        self.asks = False

    def standstill(self, found: Standstill, ranks: Sequence[RankEvidence]) -> None:
        self.reports.append((found, ranks))

    def continued(self, seconds: float) -> None:
        self.ended.append(seconds)

    def wants_evidence(self) -> bool:
        asks, self.asks = self.asks, False
        return asks

    def evidence(self, ranks: Sequence[RankEvidence], still: float, limit: float) -> None:
        self.answers.append((ranks, still, limit))


class Node:
    """Two ranks that do what a test says, and their watchdog."""

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
        self.watchdog = Watchdog(folder, dict(enumerate(pids)), self._running, 0, clock=lambda: self.now)
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
        self.watchdog.tick()
        self.watchdog.report_to(self.heard)

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
    node.watchdog.start()
    node.watchdog.stop()
    node.watchdog.report_to(node.heard)
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
    hang = hang_report.judge(ranks, found)
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
    text = hang_report.judge(ranks, found).text
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
