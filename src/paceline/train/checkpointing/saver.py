"""Checkpoints of a training: when they are written, by whom, and what becomes of one that fails.

A scheduled save is written while training goes on. If it fails (a full disk), training goes on too, with a warning; the
checkpoints before it are untouched. After three failures in a row, and at the end, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint import directory
from paceline.checkpoint.filesystem import Filesystem
from paceline.checkpoint.state import Snapshot, TrainingState
from paceline.checkpoint.writer import Description, PendingSave, SaveResult, Writer
from paceline.errors import CheckpointError
from paceline.run.folder import BEST, LATEST
from paceline.runtime import process_group
from paceline.runtime.rank_errors import StoreBarrier, run_on_all_ranks
from paceline.train.callbacks import Callbacks, Saved
from paceline.train.checkpointing.run_handle import RunHandle
from paceline.train.engine import Engine
from paceline.train.preflight import versions

_FAILURES_BORNE = 2
_CUT = "the weights are cut over the ranks: a checkpoint needs the pieces of all of them"


class Saver:
    """Writes below the run folder, once there is one."""

    def __init__(self, engine: Engine, state: TrainingState, run: RunHandle, callbacks: Callbacks) -> None:
        self._engine, self._state, self._run, self._callbacks = engine, state, run, callbacks
        self._config = config = engine.config
        self._group: Any = None
        self._writer: Writer | None = None
        self._saving: PendingSave | None = None
        self._saving_step = 0
        self._saved: int | None = None  # the step that was last saved, or is being
        self._failures = 0
        self.last_cost: SaveResult | None = None
        self.presence = StoreBarrier()
        if engine.sharded is not None:  # else made by the first scheduled save, to which all ranks come
            self._group = process_group.new_cpu_group(config.timeout)

    def channel(self) -> Any:
        """The group that saves and loads talk over; made when it is first needed, by all ranks."""
        self._group = self._group or process_group.new_cpu_group(self._config.timeout)
        return self._group

    def step(self, step: int) -> None:
        """A scheduled save, to which all ranks come."""
        if self._run.folder is not None and self._saved != step:
            self._scheduled(step)

    def last(self, step: int) -> None:
        """At the end: what is being written, and this step unless that is it. Errors are raised."""
        self.finish(bear=False)
        if self._run.folder is not None and self._saved != step:
            self._begin(step, background=False)
            self.finish(bear=False)

    def best(self, step: int) -> None:
        """This step is the best one so far, and stays until there are better ones."""
        if self._run.folder is None:
            return
        if self._saved == step:
            self.finish()
        if self._saved == step and self._run.parent is not None:
            self._point_to_best(self._run.parent)
        else:  # not saved yet, or that failed
            self._scheduled(step, best=True)

    def _scheduled(self, step: int, best: bool = False) -> None:
        background = self._config.checkpoint.background
        self.finish()
        self._begin(step, background=background, best=best)
        if not background:
            self.finish()

    def _begin(self, step: int, *, background: bool, best: bool = False) -> None:
        assert self._run.checkpoints is not None
        with self._engine.telemetry.saving():
            captured = run_on_all_ranks(self._state.capture, "Saving")
            if self._writer is None:
                self._writer = Writer(self.channel(), without_access=self._run.without_access)
            self._saving = self._writer.begin(
                self._run.checkpoints / directory.step_name(step),
                captured.tensors,
                self._describe(captured, True),
                volatile=captured.volatile,
                background=background,
                unique_name=True,
                after=lambda folder: self._committed(folder, best),
            )
        self._saving_step = self._saved = step
        self._engine.updater.before_change = self.wait_for_copy

    def _describe(self, captured: Snapshot, include_optimizer: bool) -> Description:
        engine = self._engine
        return Description(
            step=engine.position.step,
            epoch=engine.position.epoch,
            optimizer=include_optimizer,
            parent=self._run.parent,
            versions=versions(),
            layout=engine.layout_facts(),
            recipe=engine.config.to_dict(),
            data=self._run.data,
            state=captured.values,
            metadata=captured.metadata,
            aliases=captured.aliases,
        )

    def _committed(self, folder: Path, best: bool) -> None:
        """On rank 0, on the writing thread: the pointers move, and then old ones go."""
        disk, settings = Filesystem(), self._config
        directory.write_pointer(disk, folder.parent, LATEST, [folder.name])
        if best:
            self._point_to_best(folder.name)
        if settings.keep is not None:
            directory.prune(disk, folder.parent, settings.keep, settings.keep_every)

    def _point_to_best(self, name: str) -> None:
        """Each best one is better than those before, so the newest come first."""
        if self._engine.world.is_main and self._run.checkpoints is not None:
            before = [each for each in directory.read_pointer(self._run.checkpoints, BEST) if each != name]
            try:
                directory.write_pointer(
                    Filesystem(), self._run.checkpoints, BEST, [name, *before][: self._config.keep_best]
                )
            except OSError as error:  # the checkpoint is there; other ranks know nothing of pointers
                self._engine.log.warning(f"{name} is the best one, but {BEST} can't say so: {error.strerror or error}")

    def wait_for_copy(self) -> None:
        """From here on the weights may change."""
        self._engine.updater.before_change = None
        if self._saving is not None:
            with self._engine.telemetry.saving():
                self._saving.wait_for_copy()

    @property
    def is_written(self) -> bool:
        """Whether there is nothing that is still being written on this rank."""
        return self._saving is None or self._saving.is_done

    @property
    def is_waited_for(self) -> bool:
        return self._saving is not None

    def finish(self, *, bear: bool = True) -> None:
        """Wait for what is being written, and tell of it. All ranks have to come."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        self._engine.updater.before_change = None
        telemetry = self._engine.telemetry
        try:
            with telemetry.saving():
                self.last_cost = committed = saving.result()
        except CheckpointError as error:
            if error.code == "checkpoint.not-tidied":  # it is there, and good
                telemetry.saved(self._saving_step)
                self._engine.log.warning(str(error))
                return
            telemetry.saved(self._saving_step, good=False)
            self._saved = None
            self._failures += 1
            if not bear or self._failures > _FAILURES_BORNE:
                raise
            self._engine.log.warning(f"{error}\n  Training goes on.")
            return
        self._failures = 0
        telemetry.saved(self._saving_step)
        self._run.parent = committed.folder.name
        self._callbacks.call("on_save", Saved(self._saving_step, str(committed.folder)))

    def write(
        self,
        folder: Path,
        *,
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        after: Callable[[Path], None] | None = None,
    ) -> None:
        """Where every rank holds everything, rank 0 writes and waits for nobody; else all ranks have to come."""
        engine = self._engine
        require_own_weights(engine)
        if engine.sharded is None and not engine.world.is_main:
            return
        if engine.sharded is not None:
            self.presence.require(self._config.checkpoint.wait, "save_checkpoint", _CUT)
            self.finish()  # two saves at a time would mix their messages
        writer = Writer(self._group if engine.sharded is not None else None)
        with engine.telemetry.saving():
            captured = self._state.capture(metadata, without=() if include_optimizer else ("optimizer",))
            description = self._describe(captured, include_optimizer)
            writer.begin(folder.absolute(), captured.tensors, description, overwrite=overwrite, after=after).result()
        engine.telemetry.saved(engine.position.step)

    def save_on_error(self, error: BaseException) -> str | None:
        """An exception ends training: save what is whole, as far as that can be done without the others; what was done
        of it. Weights are whole between two updates, and a held-back bad step is none."""
        engine, step = self._engine, self._engine.position.step
        watch = engine.watch
        if self._run.checkpoints is None or engine.updater.is_changing or (watch is not None and watch.tripped):
            return None
        if step == self._run.began_at:  # nothing was trained since it was loaded, or begun
            return None
        if getattr(error, "code", None) == "train.nonfinite":  # it has looked, and reset the watch
            return None
        if self._saving is not None:  # also if it is an older step: two at a time would stand in each other's way
            told, begun = self._attempt(lambda: self.finish(bear=False), self._saving_step), self._saving_step
            if begun == step and (self._saved == step or engine.sharded is not None):
                return told
        if self._saved == step or (engine.sharded is None and not engine.world.is_main):
            return None
        if engine.sharded is not None:
            try:
                self.presence.require(_RESCUE_SECONDS, f"the last save, of step {step}", _CUT)
            except CheckpointError:
                return f"step {step} was not saved: the weights are cut over ranks, and not all of them came"
        target = directory.unused_name(self._run.checkpoints / directory.step_name(step))
        return self._attempt(lambda: self.write(target, after=lambda folder: self._committed(folder, False)), step)

    def _attempt(self, save: Callable[[], None], step: int) -> str:
        try:
            save()
        except Exception as error:  # the first error is what the user has to read
            return f"step {step} could not be saved: {error}"
        self._saved = step
        return f"step {step} was saved before the error ends training"

    def close(self) -> None:
        """The end of a call of train(): threads and memory go."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def forget(self) -> None:
        """The training stands elsewhere now, as a checkpoint was loaded."""
        self._saved = None


_RESCUE_SECONDS = 5.0


def require_own_weights(engine: Engine) -> None:
    if engine.average is not None and engine.average.is_swapped:
        raise CheckpointError(
            "inside-ema",
            "A checkpoint was asked for inside trainer.ema_weights().",
            why="the model holds the averages there, and the trained weights would be lost",
            fix="save and load outside of it: a checkpoint holds both",
        )
