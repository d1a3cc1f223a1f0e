"""What observers outside the process learn about training: the rank's heartbeat and the run's ledger.

    engine.telemetry.heartbeat.at(step)      every step: run/heartbeat.py, which the launcher reads at any time
    engine.telemetry.stepped(step)           when something is due: run/ledger.py, for goodput

Only rank 0 writes to the ledger, in the run folder of the launch or, without a launcher, of the training. Until the
folder is known, events are kept in memory. Other ranks note there how they failed, or were stopped.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.config.recipe import Config
from paceline.data.loader import MicroBatch
from paceline.log import Log, rank_log
from paceline.parallel.split import devices_of
from paceline.run import heartbeat
from paceline.run.folder import RunFolder
from paceline.run.ledger import Ledger, RunEnd
from paceline.runtime import environment, process_group
from paceline.runtime.process_group import World
from paceline.train import standstill
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.trainer_kwargs import DeviceLike

# Seconds between two events of a step: a thousandth of the time so far, within these bounds. A week is 10,000 lines.
_MIN_INTERVAL, _MAX_INTERVAL = 1.0, 60.0

_MAX_WARNINGS, _MAX_TEXT = 100, 500

_NUMBERS = count()  # of the trainers of this process
_AT_EXIT = list["Telemetry"]()  # those that note how the process exits


class Telemetry:
    """Created right before this rank joins the process group."""

    def __init__(self) -> None:
        page, self._suspect = _watched_by_launcher()
        self.heartbeat = heartbeat.open_writer(page)
        self._number = next(_NUMBERS)
        self._created, self._clock = time.time(), time.perf_counter()
        self._ledger: Ledger | None = None  # None: not known yet
        self._pending: list[tuple[str, float, dict[str, Any]]] = []
        self._other = 0.0  # seconds spent on other things than steps
        self._stalled = 0.0  # of them, in a save whose event is not written yet
        self._begun: tuple[int, float] | None = None  # a call to train() before its first step
        self._next = 0.0
        self._waited = 0.0
        self._rank, self._world = 0, 1
        self._run: RunFolder | None = None  # whose ledger tells how it ended
        self._is_training: bool | None = None  # None: not yet
        self._is_failed = False
        self._process = os.getpid()
        self._warnings = count()
        self.heartbeat.enter("rendezvous")

    def joined(self, world: World) -> None:
        self.heartbeat.enter("load")
        launched = environment.run_folder()
        self._rank, self._world = world.rank_info.rank, world.size
        if not world.is_main:
            self._ledger = Ledger(None)
        elif launched is not None:
            self._ledger = Ledger(launched)
        else:  # no launcher writes this event
            facts = {"nodes": world.rank_info.nodes, "ranks": world.size, "generation": environment.restart_count()}
            self._pending.append(("launched", self._created, facts))
        self._note("joined", seconds=time.perf_counter() - self._clock)

    def opened(self, run: RunFolder, name: str) -> None:
        """Training writes to this run folder from now on. `name` is the one it requested."""
        self._run = environment.run_folder() or run
        for other in _AT_EXIT[:]:  # what happens from now on is not the end of another run that has ended
            if other._is_training is False and other._run is not None and other._run.whole != self._run.whole:
                atexit.unregister(other.left)
                _AT_EXIT.remove(other)
        atexit.register(self.left)
        _AT_EXIT.append(self)
        self._open_ledger(run)
        logs = environment.log_folder()
        if logs is not None and environment.run_folder() is None and not self._rank:  # for the end of its launch
            Ledger(logs).note("opened", run=str(run))
        self._note("opened", run=str(run), name=name, generation=environment.restart_count())

    def _open_ledger(self, run: RunFolder | None) -> None:
        if self._ledger is None:
            self._ledger = Ledger(run)
            for event, when, values in self._pending:
                self._ledger.note(event, at=when, **values)
            self._pending.clear()

    def _note(self, event: str, **values: Any) -> None:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
        rounded["trainer"] = self._number
        if self._ledger is None:
            self._pending.append((event, time.time(), rounded))
        else:
            self._ledger.note(event, **rounded)

    def begins(self, step: int) -> None:
        """A call to train() starts after `step` steps."""
        self._open_ledger(None)  # training has no run folder
        self.heartbeat.enter("first step", step)
        self._is_training = True
        self._begun = (step, time.perf_counter() - self._other)

    def stepped(self, step: int, waited: float = 0.0) -> None:
        """Called when something was due after a step. `waited`: seconds for data, in this call to train()."""
        now = time.perf_counter()
        if self._begun is not None:
            before, since = self._begun
            self._begun = None
            self._note("first-step", step=step, steps=max(1, step - before), seconds=now - self._other - since)
            self._waited = waited
        elif now >= self._next:
            self._note("stepped", step=step, waited=waited - self._waited)
            self._waited = waited
        else:
            return
        self._next = now + min(max((now - self._clock) / 1000, _MIN_INTERVAL), _MAX_INTERVAL)

    def finished(self, step: int, waited: float) -> None:
        """A call to train() completed or was stopped."""
        self._begun = None
        self._note("finished", step=step, waited=max(0.0, waited - self._waited))
        self.heartbeat.enter("done")

    def ended(self, error: BaseException | None = None, heard: str = "") -> None:
        """Note how a call to train(), a custom loop or the process has ended on this rank. `heard`: the signal that
        asked for it."""
        end, self._is_training = self._end(error, heard), False
        if self._rank == 0 or end.state != "finished" or self._is_failed:
            self._is_failed = end.state != "finished"
            Ledger(self._run).note("rank-ended", **{**end.to_event(), "rank": self._rank, "trainer": self._number})

    def _end(self, error: BaseException | None, heard: str) -> RunEnd:
        heard = "SIGINT" if isinstance(error, KeyboardInterrupt) else heard
        beat = self.heartbeat.last
        if heard:
            return RunEnd("interrupted", signal=heard, step=beat.step, what=f"interrupted by {heard}")
        if error is None or (isinstance(error, SystemExit) and not error.code and self._world == 1):
            return RunEnd("finished", step=beat.step)
        from paceline.diagnose import cause, exits
        from paceline.run import failures

        record = failures.describe(error, self._rank)
        return cause.find_cause(
            [exits.RankExit(self._rank, 0, record.exit_code, record.time, record, beat.phase, beat.reached)]
        ).to_end(beat.step)

    @contextmanager
    def noting_exit(self) -> Iterator[None]:
        """Note a call to `sys.exit`: when the process exits, nobody can tell any more."""
        try:
            yield
        except SystemExit as request:
            self.ended(request)
            raise

    def left(self) -> None:
        """The process exits, or a custom loop is garbage-collected. A session goes on after an exception."""
        error = None if environment.is_interactive() else getattr(sys, "last_value", None)
        if os.getpid() == self._process and (error is not None or self._is_training):
            self.ended(error)

    def warned(self, text: str) -> None:
        """A warning was logged. Only the first ones are noted: a script may repeat one in every step."""
        if next(self._warnings) < _MAX_WARNINGS:
            self._note("warning", text=text[:_MAX_TEXT])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        seconds: list[float] = []
        try:
            with self._timed("evaluating") as seconds:
                yield
        finally:  # one that was interrupted has taken time as well
            self._note("evaluated", seconds=sum(seconds))

    @contextmanager
    def loading(self, position: TrainProgress) -> Iterator[None]:
        with self._timed("load") as seconds:
            yield
        self._note("restored", step=position.step, seconds=seconds[0])

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A save stalls training: at its beginning, or because training waits for it."""
        seconds: list[float] = []
        try:
            with self._timed("saving") as seconds:
                yield
        finally:  # a failed save has stalled training as well
            self._stalled += sum(seconds)

    def saved(self, step: int, *, good: bool = True) -> None:
        self._note("saved" if good else "save-failed", step=step, seconds=self._stalled)
        self._stalled = 0.0

    @contextmanager
    def _timed(self, phase: heartbeat.Phase) -> Iterator[list[float]]:
        """Time a block that is not training. The list receives its seconds, without those of nested blocks."""
        seconds: list[float] = []
        began, before = time.perf_counter(), self._other
        try:
            with self.heartbeat.during(phase):
                yield seconds
        finally:
            inner = self._other - before
            seconds.append(time.perf_counter() - began - inner)
            self._other += seconds[0]

    def record_suspects(self, micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Pass micro-batches through. If the launcher suspects a step, write down its samples right before training on
        them."""
        return micros if self._suspect is None else _recording(micros, *self._suspect)


def _watched_by_launcher() -> tuple[Path | None, tuple[int, Path] | None]:
    """Where the launcher looks for this rank's heartbeat; and the step whose samples it asks for, and where."""
    logs, suspect = environment.log_folder(), environment.suspect_step()
    if logs is None:
        return None, None
    rank = (environment.read_rank_info() or environment.RankInfo()).rank
    return logs.heartbeat(rank), None if suspect is None else (suspect, logs.suspects(rank))


def _recording(micros: Iterator[MicroBatch], suspect: int, path: Path) -> Iterator[MicroBatch]:
    samples: list[Any] = []
    for micro in micros:
        if micro.step + 1 == suspect:
            samples += micro.indices[: micro.samples]  # without samples, a rank runs a placeholder batch
            heartbeat.write_suspects(path, heartbeat.Suspects(suspect, micro.epoch, samples))
        yield micro


def join(config: Config, notes: Sequence[str], device: DeviceLike) -> tuple[World, Telemetry, Log]:
    """Join the process group, and show it to observers."""
    errors.advice()  # while this process can still open files
    if config.strategy == "split":  # batches and losses are on its first device
        device = devices_of(config.split)[0]
    telemetry = Telemetry()
    world = process_group.init_world(
        device=device, backend=config.backend, timeout=config.timeout, fallback=config.fallback
    )
    log = rank_log(world.rank_info.rank, quiet=config.quiet)
    for note in notes:
        log.info(note)
    standstill.observe(world.size, telemetry.heartbeat)
    telemetry.joined(world)
    log.on_warning = telemetry.warned
    return world, telemetry, log
