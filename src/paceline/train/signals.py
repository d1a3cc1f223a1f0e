"""Signals that request a checkpoint or the end of training, recorded on arrival and handled after a step.

    with Signals() as signals:                     # on every rank, around training
        ...
        request = decode(maximum over all ranks of encode(signals.request))     # at step boundaries
        if request == "save":
            signals.acknowledge(request)           # before the save, so that a later signal requests another one
        ...
        signals.end(request)                       # when everything is saved and closed

SIGUSR1 requests a checkpoint, SIGTERM and SIGINT (Ctrl-C) a checkpoint and the end. Handlers only record the request:
Python may call them in the middle of an update. A second Ctrl-C exits at once.
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

_REQUESTS: tuple[SignalRequest, ...] = ("", "save", "SIGTERM", "SIGINT")  # by priority


def encode(request: SignalRequest) -> int:
    """As a number, so that ranks agree by taking the maximum."""
    return _REQUESTS.index(request)


def decode(number: int) -> SignalRequest:
    return _REQUESTS[number]


class Signals:
    """Handlers for the duration of a `with` block. Does nothing outside the main thread, where Python allows none.

    A signal that was ignored when the process started (`nohup`, a shell's background job) stays ignored.
    """

    def __init__(self) -> None:
        self.since: float | None = None  # time.monotonic() of the first SIGTERM or SIGINT
        self._ending: SignalRequest = ""
        self._save = False  # separate from `_ending`, so that `acknowledge` and a handler never overwrite each other
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def request(self) -> SignalRequest:
        """The request with the highest priority so far."""
        return self._ending or ("save" if self._save else "")

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # None: not installed from Python, so not restorable
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in list(self._before):
            self._restore(number)

    def acknowledge(self, request: SignalRequest) -> None:
        """Clear a request for a checkpoint. A request to end stays."""
        if request == "save":
            self._save = False

    def end(self, request: SignalRequest) -> None:
        """Exit as the signal would have, on every rank. Returns for others, and if the script handles SIGTERM."""
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _handle_in_worker(number)
        elif number == signal.SIGUSR1:
            self._save = True
        elif number == signal.SIGINT and self._ending == "SIGINT":
            os.write(2, b"\ninterrupted again: exiting without waiting for the checkpoint\n")
            if _is_interactive():  # keep the session
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception would wait for the writer thread
            os.kill(os.getpid(), signal.SIGINT)
        else:
            request: SignalRequest = "SIGINT" if number == signal.SIGINT else "SIGTERM"
            self._ending = max(self._ending, request, key=encode)
            self.since = time.monotonic() if self.since is None else self.since


def _is_interactive() -> bool:
    """Whether this is an interpreter or a notebook, rather than a program that has only imported IPython."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def _handle_in_worker(number: int) -> None:
    """Forked data workers inherit the handlers. SIGTERM ends a worker. SIGINT is for its parent, which needs it until
    the end of the step; only a second one ends the worker."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
