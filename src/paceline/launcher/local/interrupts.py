"""Signal handling of the launcher: signals are forwarded to the ranks, which get time to save.

    Ctrl-C                  waits for the ranks without a limit; a second one kills them
    SIGTERM, HUP, QUIT      forwarded to the ranks, which are killed after the grace period
    SIGUSR1                 forwarded to the ranks, which save a checkpoint and continue

Ctrl-C in a terminal reaches the whole process group of the launcher, including forked ranks. `kill -INT` reaches only
the launcher and must be forwarded; but a rank that receives it twice would treat it as a second Ctrl-C. Since the
recipients of a signal cannot be observed, the parent of the ranks, which is in the same group, tells whether it got it
too. Ranks in fresh interpreters have process groups of their own and only receive forwarded signals.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.launcher.local.rank_parent import RankProcesses

_INTERRUPTED = b"\ninterrupted: waiting for ranks to save; press Ctrl-C again to kill them\n"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_GROUP_SECONDS = 1.0  # for the parent of the ranks to tell that it received a signal


class Interrupts:
    """Signal handlers of the launcher while it has ranks."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._ranks: RankProcesses | None = None
        self._deadline: float | None = None
        self._process = os.getpid()
        self.ending: signal.Signals | None = None  # the first signal that ends the run
        self.killed_at: float | None = None  # when the ranks were killed
        self.is_second = False  # whether Ctrl-C was pressed again

    def install(self) -> None:
        """Call before ranks are started."""
        _handle(HANDLED, self._heard)

    def attach(self, ranks: RankProcesses | None) -> None:
        """Signals go to these ranks, also one received while they were started; to nobody after that."""
        self._ranks = ranks
        if self.ending:
            self.send(self.ending)

    @property
    def is_over(self) -> bool:
        """Whether the grace period is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def kill(self) -> None:
        self.killed_at = self.killed_at or time.monotonic()
        self.send(signal.SIGKILL)

    def forward(self, number: int) -> None:
        """Handle a signal that another launcher of this job received."""
        if number == signal.SIGKILL:
            self.kill()
        elif number == signal.SIGUSR1:
            self.send(number)
        elif self.ending is None or number != self.ending:
            self.ending = signal.Signals(number)
            self._set_deadline(number)
            self.send(number)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process forked by another thread meanwhile
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGUSR1:
            self.send(number)
            return
        again = self.ending is not None
        self.ending = self.ending or signal.Signals(number)
        if number == signal.SIGINT and again:
            self.is_second = True
            self.kill()
        elif number == signal.SIGINT:
            with suppress(OSError):  # the screen may be gone
                os.write(2, _INTERRUPTED)  # Python's streams are not reentrant in a signal handler
            self.send(number, except_group=os.getpgrp() if self._group_heard() else -1)
        else:
            self._set_deadline(number)
            self.send(number)

    def _set_deadline(self, number: int) -> None:
        """After Ctrl-C the user can press it again; after other signals the grace period applies."""
        if number != signal.SIGINT:
            self._deadline = self._deadline or time.monotonic() + self._grace

    def _group_heard(self) -> bool:
        if self._ranks is None:
            return False
        ready, _, _ = select.select([self._ranks.interrupted], [], [], _GROUP_SECONDS)
        return bool(ready) and os.read(self._ranks.interrupted, 1) != b""

    def send(self, number: int, except_group: int = -1) -> None:
        if self._ranks is not None:
            self._ranks.send(number, except_group)


@contextmanager
def noted(*numbers: int) -> Iterator[list[int]]:
    """Record these signals, by default those that end a run."""
    heard: list[int] = []
    with restored(*(numbers or HANDLED[:4])) as handled:
        _handle(handled, lambda number, frame: heard.append(number))
        yield heard


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Turn signals into SystemExit, so that this process cleans up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with restored(*HANDLED[:4]) as handled:
        _handle(handled, leave)
        yield


def _handle(numbers: Collection[int], handler: Callable[[int, FrameType | None], object]) -> None:
    if threading.current_thread() is threading.main_thread():  # Python allows signal handlers in no other
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:  # keep signals ignored by nohup
                signal.signal(number, handler)


@contextmanager
def restored(*numbers: int) -> Iterator[Collection[int]]:
    """Restore signal handlers after the block, by default all that `Interrupts` sets. Yields their signals."""
    before = {number: signal.getsignal(number) for number in numbers or HANDLED}
    try:
        yield before.keys()
    finally:
        for number, handler in before.items():
            if handler is None:
                continue  # not set from Python, so it cannot be restored
            try:
                signal.signal(number, handler)
            except ValueError:
                return  # not the main thread, so they were not changed
