"""What the launcher does when it is told to stop: it lets the ranks hear of it, and gives them the time to save.

    Ctrl-C                  waits for the ranks as long as they take; a second one ends them at once
    SIGTERM, HUP, QUIT      goes on to the ranks, which are ended when the grace is over
    SIGUSR1                 goes on to the ranks, which save a checkpoint and go on

A terminal's Ctrl-C reaches the launcher's whole process group, and so every forked rank. `kill -INT` reaches the
launcher alone, and has to go on to the ranks; but a rank that got it twice would take that for a second Ctrl-C. Who got
a signal can't be seen from outside, so a small process in the same group listens too. Ranks in fresh interpreters are
in groups of their own, and hear from the launcher only.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

_WORDS = b"\ninterrupted: waiting for the ranks to save; Ctrl-C again ends them at once\n"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
TORCHS_OWN = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # for which torch's agent sets handlers of its own
_HEARD_WITHIN = 1.0  # seconds in which the listener tells of a signal that it got with us


class Interrupts:
    """Handlers of the launcher, for the time in which it has ranks."""

    def __init__(self, listener: int, grace: float) -> None:
        self._listener, self._grace = listener, grace
        self._pids: Callable[[], Collection[int]] = tuple
        self._deadline: float | None = None
        self._process = os.getpid()
        self.ending: signal.Signals | None = None  # the signal that began it

    def install(self) -> None:
        """Before there are ranks. Only in the main thread, as everything about signals in Python."""
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
                    signal.signal(number, self._heard)

    def watch(self, pids: Callable[[], Collection[int]]) -> None:
        """`pids` gives the processes that run; they hear of what came while they were started."""
        self._pids = pids
        if self.ending:
            self.send(self.ending)

    @property
    def is_over(self) -> bool:
        """Whether the ranks have had their time."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def told(self, number: int) -> None:
        """Another launcher of this job has got that signal, and so it is ours too."""
        if number in (signal.SIGUSR1, signal.SIGKILL):
            self.send(number)
            return
        if self.ending is None or number != self.ending:
            self.ending = signal.Signals(number)
            self._limit_unless_patient(number)
            self.send(number)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a rank that was forked just now, and has no handlers of its own yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGUSR1:
            self.send(number)
            return
        again = self.ending is not None
        self.ending = self.ending or signal.Signals(number)
        if number == signal.SIGINT and again:
            self.kill()
        elif number == signal.SIGINT:
            _say(_WORDS)
            self.send(number, but_not_to=os.getpgrp() if self._group_heard() else None)
        else:
            self._limit_unless_patient(number)
            self.send(number)

    def _limit_unless_patient(self, number: int) -> None:
        """Somebody who pressed Ctrl-C is there to press it again; after other signals the time is limited."""
        if number != signal.SIGINT:
            self._deadline = self._deadline or time.monotonic() + self._grace

    def _group_heard(self) -> bool:
        ready, _, _ = select.select([self._listener], [], [], _HEARD_WITHIN)
        return bool(ready) and os.read(self._listener, 1) != b""

    def send(self, number: int, but_not_to: int | None = None) -> None:
        for pid in self._pids():
            try:
                if os.getpgid(pid) != but_not_to:
                    os.kill(pid, number)
            except ProcessLookupError:
                continue


def _say(words: bytes) -> None:
    """Past Python's streams, which may be in the middle of a line of ours."""
    try:
        os.write(2, words)
    except OSError:
        return  # the screen is gone


@contextmanager
def listening() -> Iterator[int]:
    """A descriptor that can be read once this process group got a SIGINT."""
    heard, tell = os.pipe()
    alive, hold = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(hold)
            _listen(tell, alive)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(alive)
    try:
        yield heard
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(heard)
        os.close(hold)


def _listen(tell: int, alive: int) -> None:
    """Until the launcher and its ranks, which hold the other end of `alive`, are gone."""

    def heard(number: int, frame: FrameType | None) -> None:
        os.write(tell, b"!")

    signal.signal(signal.SIGINT, heard)
    for number in HANDLED[1:]:
        signal.signal(number, signal.SIG_IGN)
    os.read(alive, 1)


@contextmanager
def noted() -> Iterator[list[int]]:
    """The signals that came while no ranks were there to get them."""
    heard: list[int] = []
    with _handled(lambda number, frame: heard.append(number)):
        yield heard


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Signals that would end this process at once let it tidy up first."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(leave):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    endings = [number for number in HANDLED[:4] if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in endings}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def restored() -> Iterator[None]:
    """The handlers from before are there again after the block: the agent and `Interrupts` set theirs."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is None:
                continue  # set by other than Python code, which no one here could replace
            try:
                signal.signal(number, handler)
            except ValueError:
                return  # not the main thread: the agent could not set them either
