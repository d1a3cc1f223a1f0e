"""The run folder of a training: a new one, or one that is gone on with; and that nobody else writes into it.

Ranks that the launcher starts again after a failure go on in the folder that they had, from its newest good checkpoint,
whatever `resume` says. Which folder that was stands in the launch's ledger.
"""

from __future__ import annotations

import shlex
import sys
import weakref
from pathlib import Path

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.filesystem import Filesystem
from paceline.errors import CheckpointError
from paceline.plan.derived import Derived, table
from paceline.run import ledger
from paceline.run.folder import RunFolder, short
from paceline.run.jsonl import truncate_after
from paceline.run.lock import RunLock
from paceline.runtime import collectives, environment
from paceline.runtime.rank_errors import run_on_all_ranks
from paceline.runtime.shared_storage import ranks_without_access
from paceline.text import numbered
from paceline.train import factory
from paceline.train.checkpointing.restorer import Restorer
from paceline.train.checkpointing.saver import Saver
from paceline.train.engine import Engine


class RunHandle:
    def __init__(self, engine: Engine, saver: Saver, restorer: Restorer) -> None:
        self._engine, self._saver, self._restorer = engine, saver, restorer
        self._lock: RunLock | None = None

    def resume(self) -> None:
        """What a restart or the recipe's `resume` asks for, before anything is trained. A matter of all ranks."""
        resume = self._engine.config.resume
        if (before := self._before_restart()) is not None:
            self._go_on(before, f"start {environment.restart_count() + 1}")
        elif resume == "auto":
            self._resume_newest()
        elif resume is None or self._begin_from_checkpoint():  # in a new run
            return
        elif (run := RunFolder.at(resume)) is not None:
            self._go_on(run)
        else:
            raise CheckpointError(
                "missing",
                f"resume: there is neither a run nor a checkpoint at {Path(resume).absolute()}.",
                fix="paceline checkpoint ls",
            )

    def _before_restart(self) -> RunFolder | None:
        """The folder that this training had before paceline's launcher started its ranks again."""
        launch, generation = environment.run_folder(), environment.restart_count()
        if launch is None or not generation or not environment.was_launched() or self._engine.config.run is False:
            return None
        name, is_main = self._name(), self._engine.world.is_main
        found = ledger.opened_before(launch, name, generation) if is_main else None
        run = collectives.broadcast_object(None if found is None else str(found))
        return None if run is None else RunFolder(Path(run))

    def _name(self) -> str:
        """What a training asks for as its folder tells it from others of the same launch."""
        run = self._engine.config.run
        return run if isinstance(run, str) else factory.default_name(self._engine.model)

    def _begin_from_checkpoint(self) -> bool:
        """Take over the state that `resume` names, if that is a checkpoint or a file of weights."""
        resume = self._engine.config.resume
        if resume in (None, "auto"):
            return False
        path = Path(str(resume)).absolute()
        if not (path / manifests.NAME).exists() and not path.is_file():
            return False
        self._restorer.load(path)
        self._engine.log.info(f"resume: begins from {short(path)}, after step {self._engine.position.step}")
        return True

    def _resume_newest(self) -> None:
        config, engine = self._engine.config, self._engine
        if config.run is False:
            raise CheckpointError(
                "nothing-to-resume",
                "resume: auto looks for a run folder, but run: false writes none.",
                fix="give the run a name, or resume: a checkpoint's folder",
            )
        launched = environment.run_folder()  # the launcher names a run after its recipe or script
        unnamed = factory.default_name(engine.model) if launched is None else launched.requested_name
        name = config.run if isinstance(config.run, str) else unnamed
        found = RunFolder.newest(name) if engine.world.is_main else None
        run = collectives.broadcast_object(None if found is None else str(found))
        if run is None:
            engine.log.info(f"resume: there is no run called {Path(name).name} yet: it begins at its beginning")
        else:
            self._go_on(RunFolder(Path(run)))

    def _go_on(self, run: RunFolder, why: str = "resume") -> None:
        self._take(run)
        if not self._restorer.resume(run, why):
            self._begin_from_checkpoint()  # a restart before the first save
        if self._engine.world.is_main:  # without a checkpoint that is all of them
            truncate_after(run.metrics, self._engine.position.step)

    def _lock_it(self, run: RunFolder) -> None:
        """Nobody else may write into it until this call of train() is over, or the trainer gone."""
        lock = RunLock(run)
        run_on_all_ranks(lambda: lock.take() if self._engine.world.is_main else None, "Taking the run folder")
        self._lock = lock
        weakref.finalize(self, lock.release)

    def _take(self, run: RunFolder) -> None:
        """Make it this training's; and find out who can't see it."""
        engine = self._engine
        self._lock_it(run)
        self._saver.run = run
        engine.telemetry.opened(run, self._name())
        self._saver.without_access = blind = ranks_without_access(run.path)
        named = numbered("rank", blind)
        if blind and engine.config.checkpoint.unshared == "refuse":
            raise CheckpointError(
                "unshared-folder",
                f"{named.capitalize()} can't see the run folder {run}.",
                why="each rank writes its part of a checkpoint into it",
                fix="put it on a disk that all nodes share; or checkpoint: {unshared: gather}",
            )
        if blind:
            engine.log.warning(f"{named} can't see {run}: what they hold is sent to rank 0, which writes it")

    def open(self, rows: dict[str, Derived] | None = None) -> str | None:
        """The folder, made if there is none yet, with the recipe and `rows` written into it."""
        engine, saver = self._engine, self._saver
        if rows is not None:
            engine.log.info(table(rows))
        if saver.run is None:
            made = factory.open_run(engine.config, engine.model, engine.world.is_main)
            if made is not None:
                if engine.world.is_main:
                    Filesystem().sync_folder(made.path.parent)
                self._take(made)
            if rows is not None and engine.world.size == 1 and not environment.was_launched():
                engine.log.info(f"one rank; to start more: paceline launch -n 2 {shlex.join(sys.argv)}")
        elif self._lock is None:
            self._lock_it(saver.run)
        run = saver.run
        if run is not None and rows is not None and engine.world.is_main:
            factory.write_run(run, engine.config, rows)
        return str(run) if run else None

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None
