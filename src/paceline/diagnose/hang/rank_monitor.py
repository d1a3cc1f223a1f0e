"""Observes this rank, in the one thread that paceline adds to it.

Four times a second it writes the page of the rank (run/heartbeat.py), from which its launcher learns how far it has
come, and then does what is attached to it, which may wait for other processes (train/standstill.py). A launcher of ours
starts it before the user's code; without one, the first Trainer does, and there is no page.

It imports nothing: torch may never be imported by the rank's script, or be half imported now. It takes 0.1 ms of a
core per tick. Only when the rank stands still are its pending operations and its place looked up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import log
from paceline.diagnose.hang import flight_recorder
from paceline.diagnose.hang.flight_recorder import ProcessGroups
from paceline.diagnose.hang.stack_place import main_place
from paceline.run import regular_files
from paceline.run.heartbeat import RankPageWriter, counters

INTERVAL = 0.25  # seconds between two ticks
_STANDS = 0.5  # seconds
_END_SECONDS = 1.0  # for what is under way when the process exits
_monitor: RankMonitor | None = None


@dataclass(eq=False)
class _Attached:
    tick: Callable[[], float]
    due: float


class RankMonitor:
    """The thread of this process. `page`, `heartbeat`: where the launcher looks for them."""

    def __init__(self, page: Path | None, heartbeat: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.pid, self.clock = os.getpid(), clock
        self._page = None if page is None else RankPageWriter(page)
        self._heartbeat = heartbeat
        self._groups = ProcessGroups()
        self._before: object = None
        self._since = 0.0
        self._attached: list[_Attached] = []
        self._working = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-rank-monitor", daemon=True)
        self.tick()  # the code of the rank may hold the GIL from its first line on
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def attach(self, tick: Callable[[], float]) -> None:
        """Call this as well, from the next tick on. It returns in how many seconds again; a RuntimeError ends it."""
        self._attached.append(_Attached(tick, 0.0))

    def detach(self, tick: Callable[[], float]) -> None:
        """Call before the interpreter exits: a thread in a function of torch would be killed in the middle of it."""
        self._attached = [each for each in self._attached if each.tick != tick]
        if self._working.acquire(timeout=_END_SECONDS):
            self._working.release()
        if self._page is None and not self._attached:
            self.stop()

    def stop(self) -> None:
        """Call before the interpreter exits."""
        self._end()
        if not self._thread.is_alive():  # it may wait for a disk that stalls
            self.tick()

    def abandon(self) -> None:
        """Before this process runs another program, which has no such thread."""
        self._end()
        if self._page is not None:
            self._page.write({"pid": 0, "groups": [], "pending": []})

    def _end(self) -> None:
        self._attached = []
        self._stop.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.tick()

    def tick(self) -> None:
        now = self.clock()
        if self._page is not None:
            self._page.write(self._observe(now))
        if due := [each for each in self._attached if each.due <= now]:
            with self._working:
                self._do(due)

    def _do(self, due: list[_Attached]) -> None:
        if self._page is not None:
            self._page.mark(is_waiting=True)  # a store that does not answer must not look like a thread without the GIL
        for each in due:
            try:
                if each in self._attached:
                    each.due = self.clock() + each.tick()
            except Exception as error:  # must not end the page
                with suppress(ValueError):  # it was detached meanwhile
                    self._attached.remove(each)
                if not isinstance(error, RuntimeError):  # the group was destroyed, or the rank with the store has ended
                    log.warning(f"this rank is no longer observed ({type(error).__name__}: {error})")
        if self._page is not None:
            self._page.mark(is_waiting=False)

    def _observe(self, now: float) -> dict[str, Any]:
        done = {"micros": counters.micros, "read": counters.read, "calls": counters.calls}
        missing, place = self._try(lambda: self._groups.update(now)), ""
        state = (done, self._groups.operations, self._groups.membership, self._beat())
        if state != self._before:
            self._before, self._since = state, now
            self._groups.forget_pending()
        stood = now - self._since
        if stood >= _STANDS:
            with suppress(Exception):  # the stack changes meanwhile
                place = main_place().text
            if not self._groups.is_pending_known:
                missing = missing or self._try(lambda: self._groups.dump(now))
        return {
            "time": now,
            "pid": self.pid,
            **done,
            "operations": self._groups.operations,
            "groups": self._groups.to_json(),
            "stood": stood,
            "pending": self._groups.pending,
            "place": place,
            "source": self._groups.source,
            "missing": missing or self._groups.missing,
            "ended": counters.ended,
        }

    def _try(self, read: Callable[[], None]) -> str:
        """Groups come and go, and torch may be half imported: the next tick is soon. Returns the error. The page is
        written in any case, or this rank would seem to hold the GIL."""
        try:
            read()
        except Exception as error:
            return f"its collectives ({type(error).__name__}: {error})"
        return ""

    def _beat(self) -> bytes:
        with suppress(OSError):
            return regular_files.read_bytes(self._heartbeat, 64) if self._heartbeat is not None else b""
        return b""


def start(page: Path | None, heartbeat: Path | None) -> RankMonitor:
    """Start the thread of this process. A forked process has none, and starts its own if it is a rank."""
    global _monitor
    if _monitor is None:
        flight_recorder.allow_forks()
    _monitor = RankMonitor(page, heartbeat)
    return _monitor


def current() -> RankMonitor:
    """That of this process, started if no launcher of ours has. It ends when nothing is attached any more."""
    if _monitor is None or _monitor.pid != os.getpid() or _monitor.is_stopped:
        return start(None, None)
    return _monitor


def abandon() -> None:
    if _monitor is not None:
        _monitor.abandon()
