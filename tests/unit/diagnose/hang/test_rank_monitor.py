"""What the thread of a rank does in a tick, with a clock that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.diagnose.hang.rank_monitor import RankMonitor
from paceline.run import heartbeat
from paceline.run.folder import RunFolder
from paceline.run.heartbeat import RankPage, counters


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time_at_will() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def monitor(folder: RunFolder, time_at_will: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankMonitor]:
    monkeypatch.setattr(RankMonitor, "_run", lambda self: None)  # the test ticks
    monitor = RankMonitor(folder.page(0), folder.heartbeat(0), time_at_will)
    yield monitor
    monitor.stop()


def last_page(folder: RunFolder) -> RankPage:
    return heartbeat.read_pages(folder)[0]


def test_a_rank_stands_still_until_a_counter_changes(
    monitor: RankMonitor, time_at_will: Clock, folder: RunFolder
) -> None:
    for seconds in (0.25, 0.75):
        time_at_will.now = 100.0 + seconds
        monitor.tick()
    page = last_page(folder)
    assert (page.time, page.stood) == (100.75, 0.75) and page.place  # its line
    counters.micros += 1
    monitor.tick()
    page = last_page(folder)
    assert page.stood == 0.0 and not page.place and page.micros == counters.micros


def test_what_is_attached_is_done_when_it_is_due(monitor: RankMonitor, time_at_will: Clock) -> None:
    times: list[float] = []

    def work() -> float:
        times.append(time_at_will.now)
        return 1.0

    monitor.attach(work)
    for number in range(9):
        time_at_will.now = 101.0 + number / 4
        monitor.tick()
    assert times == [101.0, 102.0, 103.0]
    monitor.detach(work)
    time_at_will.now = 110.0
    monitor.tick()
    assert len(times) == 3


def test_a_page_tells_that_its_thread_waits_for_a_store(monitor: RankMonitor, folder: RunFolder) -> None:
    """A store that does not answer must not look like a thread that holds the GIL."""
    seen: list[bool] = []

    def asks_the_store() -> float:
        seen.append(last_page(folder).waits)
        return 1.0

    monitor.attach(asks_the_store)
    monitor.tick()
    assert seen == [True] and not last_page(folder).waits


@pytest.mark.parametrize(("error", "is_told"), [(RuntimeError("no store"), False), (ValueError("a bug"), True)])
def test_the_page_is_written_after_an_error_of_what_is_attached(
    monitor: RankMonitor,
    time_at_will: Clock,
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    is_told: bool,
) -> None:
    def fails() -> float:
        raise error

    monitor.attach(fails)
    for _ in range(2):
        time_at_will.now += 5.0
        monitor.tick()
    assert last_page(folder).time == time_at_will.now and not last_page(folder).waits
    said = capsys.readouterr()
    assert ("no longer observed (ValueError: a bug)" in said.out + said.err) is is_told


def test_without_a_page_only_the_rest_is_done(time_at_will: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankMonitor, "_run", lambda self: None)
    monitor, done = RankMonitor(None, None, time_at_will), list[float]()

    def work() -> float:
        done.append(time_at_will.now)
        return 1.0

    monitor.attach(work)
    monitor.tick()
    assert done == [100.0] and not monitor.is_stopped
    monitor.detach(work)
    assert monitor.is_stopped  # nobody needs it
