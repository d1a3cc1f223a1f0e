"""The methods of the Trainer for a custom loop: `training_step`, or `forward`, `backward` and `step`.

    for batch in trainer.loader(data):
        result = trainer.training_step(batch)

`custom_loop.py` has the state behind them, which `open_custom_loop` sets up. Checkpoints are saved when `save_every` or
`save_minutes` says so, as in `train()`, but the loop waits for them: it has no end at which a save in the background
could be completed, or its failure be raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from paceline.config.recipe import Config
from paceline.data import adopt
from paceline.data.loader import Loader
from paceline.errors import TrainError
from paceline.models.losses import Loss
from paceline.monitor.progress_bar import Display
from paceline.plan import layout
from paceline.plan.schedule import derive_schedule
from paceline.run.history import History, Record
from paceline.train import loop, oom
from paceline.train.callbacks import Callbacks
from paceline.train.checkpointing.restorer import Restorer
from paceline.train.checkpointing.run_handle import RunHandle, warn_of_saves
from paceline.train.checkpointing.saver import Saver
from paceline.train.custom_loop import CustomLoop, EpochLoader, StepResult
from paceline.train.engine import Engine
from paceline.train.features.schedule import LearningRate
from paceline.train.loaders import Loaders
from paceline.train.loop import StepActions
from paceline.train.random_numbers import dropout_rows
from paceline.train.rank_poll import RankPoll, Signals
from paceline.train.recorder import Recorder, Sinks
from paceline.train.telemetry import Telemetry


def open_custom_loop(
    engine: Engine,
    run: RunHandle,
    saver: Saver,
    rates: LearningRate,
    loaders: Loaders,
    callbacks: Callbacks,
    on_nonfinite: Callable[[Loader | None, Record, bool], str | None],
) -> CustomLoop:
    """Collective: must be called on every rank."""
    config, position = engine.config, engine.position
    _require_supported(config)
    saves = config.save_every is not None or config.save_minutes is not None
    if isinstance(config.run, str) or (saves and config.run is not False):  # otherwise it writes nothing
        run.create(config)
    if not engine.parts.model.training:
        engine.parts.model.train()
    run.began_at = position.step
    sinks = run.open_sinks(config)
    parts = (engine.world.device, callbacks, engine.is_bad, engine.log, engine.features.replicas, engine.features.rates)
    recorder = Recorder(History(), sinks, Display(None, position.step), *parts)
    recorder.begin()
    timed = run.folder is not None and config.save_minutes is not None
    actions = StepActions(
        recorder,
        callbacks,
        position,
        log_every=config.log_every,
        save_every=None if run.folder is None else config.save_every,
        end_of_epoch=rates.epoch_ended,
        checks=lambda: engine.stepper.checks,
        save=saver.save,
        poll=RankPoll(engine, saver, run, Signals(), config.save_minutes) if timed else None,
        on_nonfinite=lambda record, seen: on_nonfinite(custom.loader, record, seen),
    )

    def begin(steps_per_epoch: int | None) -> None:
        ends = (config.train.epochs, config.train.max_steps)
        plan = derive_schedule(engine.config, loaders.batch, steps_per_epoch, *ends, endless=True)
        rows = dict(loaders.plan.rows()) if loaders.plan else {}
        rows |= rates.begin(plan, position.step, config.train.epochs, engine.log.warning)
        rows |= dropout_rows(engine.config, engine.parts.model, engine.draw)
        if run.folder is not None:
            run.create(engine.config, rows)
        else:
            engine.log.info(layout.table(rows))
            warn_of_saves(engine.config, engine.log)
        unused = _without_effect(engine.config, rates)
        if unused:
            engine.log.warning(f"no effect in a custom loop: {', '.join(unused)}")

    job = loop.Job(lambda: iter(()), engine, recorder, actions, callbacks.hooks["on_step"])
    custom = CustomLoop(job, begin, saver.finish)
    weakref.finalize(custom, _close, recorder, sinks, run, engine.telemetry)
    return custom


def _close(recorder: Recorder, sinks: Sinks, run: RunHandle, telemetry: Telemetry) -> None:
    """Called when the trainer is garbage-collected or the process ends: a custom loop has no explicit end."""
    telemetry.left()
    with _disable_current_modes():  # the collector runs anywhere, also where another model's FLOPs are counted
        recorder.flush_last()
    sinks.close()
    run.release()


def _require_supported(config: Config) -> None:
    if config.fixed_order:
        raise TrainError("everywhere-and-loop", "Custom loops are not supported with deterministic: everywhere.")
    if config.graph:
        raise TrainError("graph-and-loop", "Custom loops are not supported with graph: true.")


def _without_effect(config: Config, rates: LearningRate) -> list[str]:
    """Settings that only `train()` can honour, with the reason."""
    evaluating = [name for name in ("eval_every", "save_best", "early_stop") if getattr(config, name) is not None]
    if rates.plateau is not None or isinstance(rates.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        evaluating.append("the plateau schedule")
    found = [f"{name} (evaluations are yours: trainer.evaluate)" for name in evaluating]
    if config.profile is not None:
        found.append("profile")
    return found


class CustomLoopMethods:
    """What `Trainer` has for a custom loop."""

    _engine: Engine
    _loaders: Loaders
    _restorer: Restorer

    def _get_custom_loop(self) -> CustomLoop:
        raise NotImplementedError

    def loader(self, data: Any) -> EpochLoader:
        """Return an iterable over this rank's micro-batches in the rest of the current epoch, for a custom loop.

        Collective: must be called on every rank.

        Args:
            data: a Dataset or a DataLoader, as for `train()`

        Returns:
            An iterable. Iterating it again continues with the step that the Trainer has reached.

        Raises:
            DataError: `data.not-data`, `data.empty`, `data.smaller-than-batch`: nothing to train on

        Example:
            >>> for batch in trainer.loader(data):
            ...     result = trainer.training_step(batch)
            >>> trainer.epoch
            2
        """
        data = adopt.recognize(data, self._engine.config.seed)
        loader, batch = self._loaders.training(data, announce=False)
        other = self._loaders.is_other_stream(data, loader)
        self._restorer.check_data(self._loaders.position(loader), self._loaders.facts(data, loader), other=other)
        return EpochLoader(self._get_custom_loop(), self._loaders.placed(loader), batch.groups)

    def training_step(self, batch: Any) -> StepResult:
        """Run a micro-batch and, after the last one of a step, step the optimizer.

        Args:
            batch: a micro-batch of this rank, from `loader()`; or another one of the same size

        Returns:
            (loss, stepped): the loss of this rank's micro-batch, detached, and whether the optimizer stepped.

        Raises:
            TrainError: `train.nonfinite`, `train.no-loss`, `train.no-gradient`; `train.out-of-memory`

        Example:
            >>> loss, stepped = trainer.training_step(next(iter(trainer.loader(data))))
            >>> stepped, trainer.step_count
            (True, 5)
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            return self._get_custom_loop().training_step(batch)

    def forward(self, batch: Any) -> Tensor:
        """Run this rank's micro-batch and return its mean loss, for `backward`.

        Args:
            batch: a micro-batch of this rank

        Returns:
            The mean loss, with its graph.

        Raises:
            TrainError: `train.no-loss`, `train.everywhere-and-forward`

        Example:
            >>> for batch in trainer.loader(data):
            ...     loss = trainer.forward(batch)
            ...     trainer.backward(loss * 0.5)
            ...     trainer.step()
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            return self._get_custom_loop().forward(batch)

    def compute(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function(model, *inputs)`, run as in a training step, for a loss of one's own.

        Precision, dropout and sharded parameters are those of the step. Collective if parameters are sharded.

        Args:
            function: called with the model and the inputs
            inputs: passed on

        Returns:
            What the function returns.

        Raises:
            TrainError: `train.graph-and-loop`, `train.everywhere-and-loop`: these settings need `training_step`

        Example:
            >>> inputs, targets = next(iter(trainer.loader(data)))
            >>> outputs = trainer.compute(lambda model, inputs: model(inputs), inputs)
            >>> trainer.backward((outputs - targets).abs().mean(), weight=len(inputs))
            >>> trainer.step()
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            return self._get_custom_loop().compute(function, *inputs)

    def backward(self, loss: Tensor | Loss, weight: Tensor | float | None = None) -> None:
        """Accumulate the gradients of a loss.

        Args:
            loss: the loss of `forward`, or a value computed from it; with `weight`, any other loss
            weight: of how many samples or tokens of this rank the loss is a mean

        Raises:
            TrainError: `train.backward-without-forward`, `train.no-gradient`, `train.nonfinite`

        Example:
            >>> loss = trainer.forward(next(iter(trainer.loader(data))))
            >>> trainer.backward(loss)
            >>> trainer.step()
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            self._get_custom_loop().backward(loss, weight)

    def step(self) -> None:
        """Update the parameters with the gradients of all backwards since the last step.

        Clips gradients, steps the optimizer, the schedule and the EMA, and logs, as `train()` does.

        Raises:
            TrainError: `train.step-without-backward`, `train.nonfinite`

        Example:
            >>> trainer.backward(trainer.forward(next(iter(trainer.loader(data)))))
            >>> trainer.step()
            >>> trainer.step_count
            5
        """
        self._get_custom_loop().step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager in which gradients are not reduced, for all but the last backward of a step.

        Returns:
            The context manager.

        Example:
            >>> halves = paceline.Trainer(
            ...     nn.Linear(4, 1), criterion=nn.MSELoss(), batch=8, accumulate=2, run=False, quiet=True
            ... )
            >>> batches = iter(halves.loader(data))
            >>> with halves.no_sync():
            ...     halves.backward(halves.forward(next(batches)))
            >>> halves.backward(halves.forward(next(batches)))
            >>> halves.step()
        """
        return self._get_custom_loop().no_sync()
