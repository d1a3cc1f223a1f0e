"""What a person or a scheduler asks of a run by a signal, noted now and done at the end of a step.

    with Signals() as signals:                     # on every rank, around training
        ...
        request = decode(largest over all ranks of encode(signals.request))     # at step boundaries
        if request == "save":
            signals.take(request)                  # before the save begins, so that a later signal asks for another one
        ...
        signals.end(request)                       # when everything is saved and closed, with the agreed request

SIGUSR1 asks for a checkpoint, SIGTERM and SIGINT (Ctrl-C) for a checkpoint and the end. A handler does nothing but
note: Python calls it between any two operations, where weights are half updated and other ranks know nothing of it. A
second Ctrl-C leaves at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Literal

SignalRequest = Literal["", "save", "SIGTERM", "SIGINT"]

_REQUESTS: tuple[SignalRequest, ...] = ("", "save", "SIGTERM", "SIGINT")  # the larger number wins


def encode(request: SignalRequest) -> int:
    """As a number, for ranks that agree by a maximum."""
    return _REQUESTS.index(request)


def decode(number: int) -> SignalRequest:
    return _REQUESTS[number]


class Signals:
    """Handlers for the time of a `with` block. Outside the main thread Python allows none, and this does nothing.

    A signal that this process was started to ignore (`nohup`, a shell's background job) stays ignored.
    """

    def __init__(self) -> None:
        self.since: float | None = None  # time.monotonic() of the first SIGTERM or SIGINT
        self._ending: SignalRequest = ""
        self._save = False  # apart from `_ending`, so that neither `take` nor a handler can undo the other's work
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def request(self) -> SignalRequest:
        """The strongest so far."""
        return self._ending or ("save" if self._save else "")

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # None: not set by Python, which could not set it again
                    self._before[number] = before
                    signal.signal(number, self._heard)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in list(self._before):
            self._restore(number)

    def take(self, request: SignalRequest) -> None:
        """The request for a save is being granted; an end stays wished."""
        if request == "save":
            self._save = False

    def end(self, request: SignalRequest) -> None:
        """Go as the signal would have made this process go, also where another rank got it. Returns for other wishes,
        and where the script has a handler of its own for SIGTERM, which has run by then."""
        if request == "SIGINT":
            raise KeyboardInterrupt
        if request == "SIGTERM":
            self._restore(signal.SIGTERM)
            sys.stdout.flush()
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _heard_in_child(number)
        elif number == signal.SIGUSR1:
            self._save = True
        elif number == signal.SIGINT and self._ending == "SIGINT":
            os.write(2, b"\ninterrupted again: leaving at once, without waiting for a save\n")
            if hasattr(sys, "ps1") or "ipykernel" in sys.modules:  # a session that is to live on
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception would wait for the thread that writes
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self._ending = max(self._ending, _request(number), key=encode)
            self.since = time.monotonic() if self.since is None else self.since


def _request(number: int) -> SignalRequest:
    return "SIGINT" if number == signal.SIGINT else "SIGTERM"


def _heard_in_child(number: int) -> None:
    """A forked data worker has the handlers too. SIGTERM ends it; the others are for its parent, which needs it until
    the end of the step: only a second Ctrl-C ends it as well."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
