"""What a training tells those who watch it from outside: its rank's page, and the run's ledger.

    engine.account.page.at(step)             every step: run/heartbeat.py, which the launcher reads at any moment
    engine.account.stepped(step)             when something is due: run/ledger.py, where the minutes went

Only the first rank writes into the ledger. It lies where the launcher keeps the logs of this launch; without a
launcher in the training's own run folder, and what happens before that is known is kept until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.data.loader import MicroBatch
from paceline.run import heartbeat
from paceline.run.folder import RunFolder
from paceline.run.ledger import Ledger
from paceline.runtime import environment
from paceline.runtime.process_group import World
from paceline.train.checkpointing.position import TrainProgress

# Between two notes of a step: a thousandth of the time so far, within these bounds. A week is then 10,000 short lines.
_LEAST, _MOST = 1.0, 60.0


class Telemetry:
    """Made right before this rank meets the others."""

    def __init__(self) -> None:
        page, self._suspect = _watched_by_launcher()
        self.page = heartbeat.open_writer(page)
        self._made, self._clock = time.time(), time.perf_counter()
        self._ledger: Ledger | None = None  # not known yet
        self._early: list[tuple[str, float, dict[str, Any]]] = []
        self._aside = 0.0  # seconds that went into other things than steps
        self._stalled = 0.0  # of them, in the save that is not noted yet
        self._begun: tuple[int, float] | None = None  # a call of train() that has not done its first step
        self._next = 0.0
        self.page.enter("rendezvous")

    def joined(self, world: World) -> None:
        self.page.enter("load")
        launched = environment.run_folder()
        if not world.is_main:
            self._ledger = Ledger(None)
        elif launched is not None:
            self._ledger = Ledger(launched)
        else:  # nobody else writes this line
            facts = {"nodes": world.rank_info.nodes, "ranks": world.size, "generation": environment.restart_count()}
            self._early.append(("launched", self._made, facts))
        self._note("joined", seconds=time.perf_counter() - self._clock)

    def opened(self, run: RunFolder, name: str) -> None:
        """This training writes into that run folder from now on. `name` is what it asked for."""
        self._write_into(run)
        self._note("opened", run=str(run), name=name, generation=environment.restart_count())

    def _write_into(self, run: RunFolder | None) -> None:
        if self._ledger is None:
            self._ledger = Ledger(run)
            for event, when, values in self._early:
                self._ledger.note(event, at=when, **values)
            self._early.clear()

    def _note(self, event: str, **values: Any) -> None:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
        if self._ledger is None:
            self._early.append((event, time.time(), rounded))
        else:
            self._ledger.note(event, **rounded)

    def begins(self, step: int) -> None:
        """A call of train(), after `step` steps."""
        self._write_into(None)  # a training that has no run folder by now gets none
        self.page.enter("first step", step)
        self._begun = (step, time.perf_counter() - self._aside)

    def stepped(self, step: int) -> None:
        """Called when something was due after a step."""
        now = time.perf_counter()
        if self._begun is not None:
            before, since = self._begun
            self._begun = None
            self._note("first-step", step=step, steps=max(1, step - before), seconds=now - self._aside - since)
        elif now >= self._next:
            self._note("stepped", step=step)
        else:
            return
        self._next = now + min(max((now - self._clock) / 1000, _LEAST), _MOST)

    def finished(self, step: int) -> None:
        """A call of train() did what it was asked for, or was told to end."""
        self._begun = None
        self._note("finished", step=step)
        self.page.enter("done")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._apart("evaluating") as seconds:
            yield
        self._note("evaluated", seconds=seconds[0])

    @contextmanager
    def loading(self, position: TrainProgress) -> Iterator[None]:
        with self._apart("load") as seconds:
            yield
        self._note("restored", step=position.step, seconds=seconds[0])

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Training stands still for a save: at its beginning, or because it is waited for."""
        seconds: list[float] = []
        try:
            with self._apart("saving") as seconds:
                yield
        finally:  # one that fails has held training up as well
            self._stalled += sum(seconds)

    def saved(self, step: int, *, good: bool = True) -> None:
        self._note("saved" if good else "save-failed", step=step, seconds=self._stalled)
        self._stalled = 0.0

    @contextmanager
    def _apart(self, phase: heartbeat.Phase) -> Iterator[list[float]]:
        """Time that is not training's: how much it was, without what inner blocks have counted, is in the list."""
        seconds: list[float] = []
        began, before = time.perf_counter(), self._aside
        try:
            with self.page.during(phase):
                yield seconds
        finally:
            inner = self._aside - before
            seconds.append(time.perf_counter() - began - inner)
            self._aside += seconds[0]

    def noting_suspects(self, micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The same micro-batches. Where the launcher suspects a step, its samples are written down just before they are
        trained on."""
        return micros if self._suspect is None else _noting(micros, *self._suspect)


def _watched_by_launcher() -> tuple[Path | None, tuple[int, Path] | None]:
    """Where the launcher looks for this rank's heartbeat; and the step whose samples it asks for, and where."""
    logs, suspect = environment.log_folder(), environment.suspect_step()
    if logs is None:
        return None, None
    rank = (environment.read_rank_info() or environment.RankInfo()).rank
    return logs.heartbeat(rank), None if suspect is None else (suspect, logs.suspects(rank))


def _noting(micros: Iterator[MicroBatch], suspect: int, path: Path) -> Iterator[MicroBatch]:
    samples: list[Any] = []
    for micro in micros:
        if micro.step + 1 == suspect:
            samples += micro.indices[: micro.samples]  # a rank without any runs a stand-in
            heartbeat.write_suspects(path, heartbeat.Suspects(suspect, micro.epoch, samples))
        yield micro
