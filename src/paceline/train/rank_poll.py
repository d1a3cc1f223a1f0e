"""Asynchronous events: a signal, a checkpoint due by time, a finished write.

Ranks observe them at different moments but must act at the same step. So about once a second, at a step boundary, they
exchange them in one small reduction, which also determines the step of the next one.

Signals are recorded on arrival and handled after a step:

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
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from types import FrameType
from typing import Any, Literal

import torch

from paceline.data.loader import MicroBatch
from paceline.runtime import collectives, environment
from paceline.train.checkpointing.run_handle import RunHandle
from paceline.train.checkpointing.saver import Saver
from paceline.train.engine import Engine

_INTERVAL = 1.0  # seconds
_GROWTH = 2  # of the steps between two polls: the first steps seem short, until the queue of a GPU is full
SignalRequest = Literal["", "save", "SIGTERM", "SIGINT"]

_REQUESTS: tuple[SignalRequest, ...] = ("", "save", "SIGTERM", "SIGINT")  # by priority


def encode(request: SignalRequest) -> int:
    """As a number, so that ranks agree by taking the maximum."""
    return _REQUESTS.index(request)


def decode(number: int) -> SignalRequest:
    return _REQUESTS[number]


class Signals:
    """Handlers for the duration of a `with` block. Does nothing outside the main thread, where Python allows none.

    A signal that was ignored when the process started (`nohup`, a shell's background job) stays ignored. `heard` is
    called with one that asks for the end: the process may be killed before it gets there.
    """

    def __init__(self, heard: Callable[[str], object] = str) -> None:
        self._heard = heard
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
            if environment.is_interactive():  # keep the session
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception would wait for the writer thread
            os.kill(os.getpid(), signal.SIGINT)
        else:
            request: SignalRequest = "SIGINT" if number == signal.SIGINT else "SIGTERM"
            self._ending = max(self._ending, request, key=encode)
            self._heard(self._ending)
            self.since = time.monotonic() if self.since is None else self.since


def _handle_in_worker(number: int) -> None:
    """Forked data workers inherit the handlers. SIGTERM ends a worker. SIGINT is for its parent, which needs it until
    the end of the step; only a second one ends the worker."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)


class Interrupted(Exception):
    """A signal has asked for the end during a validation, on any rank. The step is saved by the next poll."""


class RankPoll:
    """For one call of `train()`. `next` is the latest step after which it must be called again."""

    def __init__(self, engine: Engine, saver: Saver, run: RunHandle, signals: Signals, minutes: float | None) -> None:
        self._engine, self._saver, self._run, self._signals, self._minutes = engine, saver, run, signals, minutes
        step = run.began_at
        self._last_step, self._last_time = step, monotonic()
        self._saved_at = monotonic()
        self.next = step + 1
        self._owed = self._warned = False  # whether a scheduled save was postponed, and that was logged
        self.request: SignalRequest = ""  # the signal that ends training, agreed by all ranks

    def __call__(self, step: int, flush: Callable[[], str | None]) -> str | None:
        """Return the reason to end training after `step`, if any. Collective: must be called on every rank.

        `flush` runs before a save: losses are read at log points only, and a non-finite one must not be saved.
        """
        if self.request:  # agreed and saved
            return self.request
        now = monotonic()
        # Only rank 0's clock counts: clocks of different ranks would disagree.
        due = self._minutes is not None and self._engine.world.is_main and now - self._saved_at > self._minutes * 60
        step_seconds = (now - self._last_time) / max(step - self._last_step, 1)
        saver = self._saver
        observed = (encode(self._signals.request), due, not saver.is_idle, step_seconds)
        saving = (not saver.can_plan, saver.would_wait(step))
        request, timed, writing, seconds, early, busy = self._reduce([float(value) for value in observed + saving])
        interval = _INTERVAL / 4 if self._owed else _INTERVAL
        self.next = step + max(1, min(int(interval / max(seconds, 1e-6)), _GROWTH * (step - self._last_step)))
        if self._last_step > self._run.began_at and not early:  # after the first step, which is not a usual one
            saver.prepare()
        self._last_step, self._last_time = step, now
        if saver.is_pending and not writing:
            saver.finish()
        agreed = decode(int(request))
        if not agreed and (busy or not (timed or self._owed)):
            return None
        return flush() or self._act(agreed, step)

    def _reduce(self, values: list[float]) -> list[float]:
        if self._engine.world.size == 1:
            return values
        numbers = torch.tensor(values, dtype=torch.float64, device=self._engine.world.device)
        collectives.all_reduce(numbers, op="max")
        if self._engine.features.reduction.traffic is not None:
            self._engine.features.reduction.traffic.all_reduce(numbers.nbytes, self._engine.world.size)
        return numbers.tolist()

    def _act(self, request: SignalRequest, step: int) -> str | None:
        if request in ("SIGTERM", "SIGINT"):
            self.request = request
            self._save_within_grace(step)
            return request
        self._signals.acknowledge("save")
        if request == "save" and self._run.folder is not None:
            self._engine.log.info(f"SIGUSR1: saving step {step}")
        self._saver.save(step)
        self._saved_at, self._owed = monotonic(), False
        return None

    def save(self, step: int) -> None:
        """Save a scheduled step. If the previous save is still being written, training does not wait for it: a later
        step is saved, after which it is done. Collective."""
        self._owed = bool(self._reduce([float(self._saver.would_wait(step))])[0])
        if not self._owed:
            self._saver.save(step)
        elif not self._saver.is_pending:
            self._engine.log.info(f"step {step} is saved a few steps later: its host memory is still being allocated")
        elif not self._warned:
            self._warned = True
            self._engine.log.warning(
                f"step {step} is not saved, but a later one: the previous checkpoint is still being written, and "
                "training does not wait for it. This is logged once; if it happens often, save less often"
            )

    def reading(self, micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches of a validation, equally many on every rank, until any rank was asked to end."""
        polled, due, since = 0, 1, monotonic()
        for number, micro in enumerate(micros):
            if number == due:
                seconds = (monotonic() - since) / (number - polled)
                request, seconds = self._reduce([float(encode(self._signals.request)), seconds])
                if decode(int(request)) in ("SIGTERM", "SIGINT"):
                    raise Interrupted
                due = number + max(1, min(int(_INTERVAL / max(seconds, 1e-6)), _GROWTH * (number - polled)))
                polled, since = number, monotonic()
            yield micro

    def finish(self, step: int) -> None:
        """Finish a pending save, and make up for a postponed one. Collective."""
        if self._owed:
            self._saver.save_last(step)
        self._saver.finish(tolerate_failure=False)

    def _save_within_grace(self, step: int) -> None:
        """Save a checkpoint, unless the remaining time is too short: then the previous checkpoint is kept."""
        grace, cost, since = self._engine.config.checkpoint.grace, self._saver.last_cost, self._signals.since
        left = None if grace is None else grace - (0.0 if since is None else monotonic() - since)
        fits = left is None or cost is None or cost.seconds["all"] < left
        if collectives.broadcast_object(fits):
            self._saver.save_last(step)
            if self._run.folder is not None:
                path = self._run.folder.short
                self._engine.log.info(f"{self.request}: saved step {step}; continue with resume={path}")
            return
        self._saver.finish()
        self._engine.log.warning(
            f"step {step} is not saved: the last save took {cost.seconds['all'] if cost else 0:.1f} s, but only "
            f"{max(left or 0, 0):.1f} s are left (checkpoint.grace)"
        )
