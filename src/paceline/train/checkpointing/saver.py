"""When checkpoints are saved, by which ranks, and what happens if a save fails.

A scheduled save is written while training continues. If it fails (a full disk), a warning is logged and training
continues; earlier checkpoints are untouched. Three failures in a row, or one in the last save, raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.checkpoint.checkpoint_store import Address, CheckpointStore, step_name
from paceline.checkpoint.state import Snapshot, TrainingState
from paceline.checkpoint.writer import Description, PendingSave, SaveResult, Writer, prune
from paceline.config.recipe import Config
from paceline.errors import CheckpointError
from paceline.run.folder import BEST, LATEST
from paceline.runtime import process_group
from paceline.runtime.consistency import run_on_all_ranks
from paceline.runtime.method_check import Departures, require_same_method
from paceline.train.callbacks import Callbacks, Saved
from paceline.train.checkpointing.run_handle import SETUP, RunHandle
from paceline.train.checks.preflight import versions
from paceline.train.engine import Engine
from paceline.train.features.local_steps import with_means
from paceline.train.hooks import Hooks

_TOLERATED_FAILURES = 2
_SHORT_WAIT = 32 << 20  # bytes of a rank: writing them takes a moment, so each is saved at its step
_ON_ERROR_SECONDS = 5.0
_OR_ALONE_SECONDS = 1.0  # if rank 0 saves alone otherwise: the launcher ends it soon after another rank has died
UNRECORDED = {"records": "of one rank"}  # among the data of a manifest: the last steps lack the losses of other ranks
_FEW_STEPS = 10


class Saver:
    """Saves to the run folder, if there is one."""

    def __init__(self, engine: Engine, state: TrainingState, run: RunHandle, callbacks: Callbacks) -> None:
        self._engine, self._state, self._run, self._callbacks = engine, state, run, callbacks
        self._config = config = engine.config
        self._group: Any = None
        self._writer: Writer | None = None
        self._pending: PendingSave | None = None
        self._pending_step = 0
        self._saved: int | None = None  # the last step saved or being saved
        self._failures = 0
        self.last_cost: SaveResult | None = None
        # Whether no rank has all of the weights: parameters are sharded, or replicas train apart.
        self._in_parts = engine.bound.held is not None or engine.features.replica_average is not None
        # Whether no rank has all of the state: nor does it, if what reduces gradients has its own on each.
        self._together = self._in_parts or (engine.world.size > 1 and engine.features.reduction.is_saved)
        self._final = Departures(2 * (_ON_ERROR_SECONDS if self._in_parts else _OR_ALONE_SECONDS))
        if self._together:  # otherwise created by the first scheduled save, which is collective
            self._group = process_group.new_cpu_group(config.timeout)

    def group(self) -> Any:
        """The process group of saves and loads, created on first use. Collective."""
        self._group = self._group or process_group.new_cpu_group(self._config.timeout)
        return self._group

    def save(self, step: int) -> None:
        """Save a scheduled step. Collective."""
        if self._run.store is not None and self._saved != step:
            self._save(step)

    def prepare(self) -> None:
        """Plan scheduled saves and allocate their memory, or the first one would wait for it. Collective."""
        config = self._config
        scheduled = (config.save_every, config.save_minutes, config.save_best) != (None, None, None)
        if self._run.store is None or self._writer is not None or not (scheduled and config.checkpoint.background):
            return
        with self._engine.telemetry.saving():
            self._open_writer().prepare(self._capture(planned=True).tensors)

    def _capture(self, *, planned: bool = False) -> Snapshot:
        """The state of a scheduled save. Collective."""
        snapshot, average = run_on_all_ranks(self._state.capture, "Saving"), self._engine.features.replica_average
        return snapshot if average is None else with_means(snapshot, average, planned=planned)

    @property
    def can_plan(self) -> bool:
        """Whether the optimizer has its state: fp16 skips the first steps, until the loss scale is low enough."""
        return bool(self._engine.bound.optimizer.state) or not self._engine.bound.scaler.is_enabled()

    def _open_writer(self) -> Writer:
        self._writer = self._writer or Writer(self.group(), without_access=self._run.without_access)
        return self._writer

    def save_last(self, step: int) -> None:
        """Finish a pending save, then save this step if it has not been. Raises errors. Collective."""
        self.finish(tolerate_failure=False)
        if self._run.store is not None and self._saved != step:
            self._begin(step, background=False)
            self.finish(tolerate_failure=False)

    def save_best(self, step: int) -> None:
        """Save this step as the best so far. Collective."""
        if self._run.store is None:
            return
        if self._saved == step:
            self.finish()
        if self._saved == step and self._run.parent is not None:
            self._point_to_best(self._run.parent)
        else:  # not saved yet, or the save failed
            self._save(step, best=True)

    def _save(self, step: int, best: bool = False) -> None:
        background = self._config.checkpoint.background
        self.finish()
        self._begin(step, background=background, best=best)
        if not background:
            self.finish()

    def _begin(self, step: int, *, background: bool, best: bool = False) -> None:
        store = self._run.store
        assert store is not None
        with self._engine.telemetry.saving():
            self._run.before_save()
            snapshot = self._capture()
            self._pending = self._open_writer().begin(
                Address(store, step_name(step)),
                snapshot.tensors,
                self._describe(snapshot, True),
                volatile=snapshot.volatile,
                background=background,
                unique_name=True,
                before=self._run.sync_records,
                after=partial(self._committed, store, best),
            )
        self._pending_step = self._saved = step
        self._engine.hooks.set(Hooks(name="saver", before_update=lambda step: self.wait_for_copy()))

    def _describe(self, snapshot: Snapshot, include_optimizer: bool, *, recorded: bool = True) -> Description:
        engine = self._engine
        return Description(
            step=engine.position.step,
            epoch=engine.position.epoch,
            optimizer=include_optimizer,
            parent=self._run.parent,
            versions=versions(),
            layout=engine.layout_facts(),
            recipe=engine.config.to_dict(),
            data={
                **self._run.data,
                **self._run.together(),
                SETUP: engine.setup.facts(),
                **({} if recorded else UNRECORDED),
            },
            state=snapshot.values,
            metadata=snapshot.metadata,
            aliases=snapshot.aliases,
        )

    def _committed(self, store: CheckpointStore, best: bool, name: str) -> None:
        """Update the pointers, then remove old checkpoints. Called on rank 0, on the writing thread."""
        store.point(LATEST, [name])
        if best:
            self._point_to_best(name)
        if self._config.keep is not None:
            prune(store, self._config.keep, self._config.keep_every)

    def _point_to_best(self, name: str) -> None:
        """Add a checkpoint to the best ones, newest first, because each is better than the previous ones."""
        store = self._run.store
        if self._engine.world.is_main and store is not None:
            before = [each for each in store.pointer(BEST) if each != name]
            try:
                store.point(BEST, [name, *before][: self._config.keep_best])
            except OSError as error:  # not fatal: the checkpoint is intact
                self._engine.log.warning(f"Could not add {name} to the {BEST} pointer: {error.strerror or error}")

    def wait_for_copy(self) -> None:
        """Return when the weights may change."""
        self._engine.hooks.set(Hooks(name="saver"))
        if self._pending is not None:
            with self._engine.telemetry.saving():
                self._pending.wait_for_copy()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no save in progress."""
        return self._pending is None or self._pending.is_done

    def would_wait(self, step: int) -> bool:
        """Whether saving this step would have to wait, for the disk or for memory, longer than a moment."""
        kept = self._config.keep_every is not None and step % self._config.keep_every == 0
        return self._writer is not None and self._writer.size > _SHORT_WAIT and not self._writer.is_ready and not kept

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def finish(self, *, tolerate_failure: bool = True) -> None:
        """Wait for a pending save and report its result. Collective."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._engine.hooks.set(Hooks(name="saver"))
        telemetry = self._engine.telemetry
        try:
            with telemetry.saving():
                self.last_cost = committed = pending.result()
        except CheckpointError as error:
            if error.code == "checkpoint.not-tidied":  # it was committed
                telemetry.saved(self._pending_step)
                self._engine.log.warning(str(error))
                return
            telemetry.saved(self._pending_step, good=False)
            self._saved = None
            self._failures += 1
            if not tolerate_failure or self._failures > _TOLERATED_FAILURES:
                raise
            self._engine.log.warning(f"{error}\n  Training continues.")
            return
        self._failures = 0
        telemetry.saved(self._pending_step)
        self._run.parent = committed.at.name
        self._callbacks.call("on_save", Saved(self._pending_step, str(committed.at)))

    def write(
        self,
        at: Address,
        *,
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        unique_name: bool = False,
        recorded: bool = True,
        alone: bool = False,
        after: Callable[[str], None] | None = None,
    ) -> None:
        """Save synchronously. Collective if parameters are sharded or ranks have a state of their own; otherwise, and
        `alone`, only rank 0 saves."""
        engine, together = self._engine, self._together and not alone
        require_own_weights(engine)
        if not together and not engine.world.is_main:
            return
        if together:
            require_same_method(self._config.checkpoint.wait)
            self.finish()  # concurrent saves would mix up their messages
        writer = Writer(self._group if together else None)
        with engine.telemetry.saving():
            self._run.before_save()
            left_out = () if include_optimizer else ("optimizer", "outer")
            capture = partial(self._state.capture, metadata, without=left_out)
            if engine.features.replica_average is None:
                snapshot = capture()
            else:
                snapshot = run_on_all_ranks(capture, "Saving")
                snapshot = with_means(snapshot, engine.features.replica_average, own=include_optimizer)
            description = self._describe(snapshot, include_optimizer, recorded=recorded)
            writer.begin(
                at,
                snapshot.tensors,
                description,
                overwrite=overwrite,
                unique_name=unique_name,
                before=self._run.sync_records,
                after=after,
            ).result()
        engine.telemetry.saved(engine.position.step)

    def save_on_error(self, error: BaseException, *, recorded: bool = True) -> str | None:
        """Save before an exception propagates, if the weights are consistent: between optimizer steps, and without a
        pending non-finite step. If no rank has all of the state, waits briefly for the other ranks; without them,
        nothing is saved if parameters are sharded or replicas train apart (one of them is not the mean of all), and
        otherwise rank 0 saves alone. Returns a message.

        If the last steps are not `recorded` with the losses of all ranks, the run resumes from its last scheduled
        checkpoint and records them again, provided that this costs only a few steps."""
        engine, step, last = self._engine, self._engine.position.step, self._saved
        apart = "replicas train apart (sync.every)" if engine.features.replica_average is not None else ""
        store = self._run.store
        if store is None or engine.updater.is_changing or engine.is_blocked:
            interrupted = apart and store is not None and engine.updater.is_changing
            return f"step {step} was not saved: {apart}, and a round was interrupted" if interrupted else None
        if step == self._run.began_at:  # no step was completed in this call
            return None
        if getattr(error, "code", None) == "train.nonfinite":  # raising it has reset the watch
            return None
        if self._pending is not None:  # even of an earlier step: concurrent saves would interfere
            begun = self._pending_step
            outcome = self._attempt(lambda: self.finish(tolerate_failure=False), begun)
            if begun == step and (self._saved == step or self._together):
                return outcome
        if self._saved == step or (not self._together and not engine.world.is_main):
            return None
        shared = self._together and engine.world.size > 1
        alone = shared and self._final.joined_by(str(step)) < engine.world.size
        if alone and self._in_parts:
            why = apart or "parameters are sharded"
            return f"step {step} was not saved: {why}, and not all ranks reached the save"
        if alone and not engine.world.is_main:
            return None
        since = step - (self._run.began_at if last is None else last)
        spare = not recorded and self._run.parent is not None and since <= few_steps(self._config)
        after = None if spare else partial(self._committed, store, False)
        options: dict[str, Any] = {"unique_name": True, "recorded": recorded, "alone": alone, "after": after}
        message = self._attempt(lambda: self.write(Address(store, step_name(step)), **options), step)
        if spare:
            return f"{message}, but the run resumes from {self._run.parent}: other ranks died with their last losses"
        only = "the last recorded losses are those of this rank only (of_rank)"
        return message if recorded else f"{message}; {only}"

    def _attempt(self, save: Callable[[], None], step: int) -> str:
        try:
            save()
        except Exception as error:  # must not hide the original error
            return f"step {step} could not be saved: {error}"
        self._saved = step
        return f"step {step} was saved before exiting"

    def close(self) -> None:
        """Free threads and memory, at the end of train()."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def reset(self) -> None:
        """Forget the last saved step, after a checkpoint was loaded."""
        self._saved = None


def few_steps(config: Config) -> int:
    """How many steps are worth training again, to record them with the losses of all ranks."""
    return max(_FEW_STEPS, config.log_every)


def require_own_weights(engine: Engine) -> None:
    if engine.features.average is not None and engine.features.average.is_swapped:
        raise CheckpointError("inside-ema", "A checkpoint was saved or loaded inside trainer.ema_weights().")
