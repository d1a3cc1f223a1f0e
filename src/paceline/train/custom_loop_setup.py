"""Set up a custom loop: its run folder, recorder, agenda and saves.

Checkpoints are saved when `save_every` or `save_minutes` says so, as in `train()`, but the loop waits for them: it has
no end at which a save in the background could be completed, or its failure be raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from paceline.config.recipe import Config
from paceline.data.loader import Loader
from paceline.errors import TrainError
from paceline.monitor.progress_bar import Silent
from paceline.plan import layout
from paceline.plan.schedule import derive_schedule
from paceline.run.history import History, Record
from paceline.train import loop
from paceline.train.agenda import Agenda
from paceline.train.callbacks import Callbacks
from paceline.train.checkpointing.run_handle import RunHandle, warn_of_saves
from paceline.train.checkpointing.saver import Saver
from paceline.train.custom_loop import CustomLoop, close_custom_loop
from paceline.train.engine import Engine
from paceline.train.loaders import Loaders
from paceline.train.lr import LearningRate
from paceline.train.random_numbers import dropout_rows
from paceline.train.rank_poll import RankPoll
from paceline.train.recorder import Recorder
from paceline.train.signals import Signals


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
    if not engine.model.training:
        engine.model.train()
    run.began_at = position.step
    sinks = run.open_sinks(config)
    parts = (engine.world.device, callbacks, engine.is_bad, engine.log, engine.replicas, engine.rates)
    recorder = Recorder(History(), sinks, Silent(position.step), *parts)
    recorder.begin()
    timed = run.folder is not None and config.save_minutes is not None
    agenda = Agenda(
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
        rows |= rates.begin(plan, config.train.epochs, engine.log.warning)
        rows |= dropout_rows(engine.config, engine.model, engine.draw)
        if run.folder is not None:
            run.create(engine.config, rows)
        else:
            engine.log.info(layout.table(rows))
            warn_of_saves(engine.config, engine.log)
        unused = _without_effect(engine.config, rates)
        if unused:
            engine.log.warning(f"no effect in a custom loop: {', '.join(unused)}")

    job = loop.Job(lambda: iter(()), engine, recorder, agenda, callbacks.hooks["on_step"])
    custom = CustomLoop(job, begin, saver.finish)
    weakref.finalize(custom, close_custom_loop, recorder, sinks)
    return custom


def _require_supported(config: Config) -> None:
    if config.fixed_order:
        raise TrainError(
            "everywhere-and-loop",
            "Custom loops are not supported with deterministic: everywhere.",
            why="the Trainer must compute each slice of a batch by itself, and add their gradients in a fixed order",
            fix="use trainer.train(data) with callbacks, or set deterministic: true",
        )
    if config.graph:
        raise TrainError(
            "graph-and-loop",
            "Custom loops are not supported with graph: true.",
            why="a graph is the whole step, which a custom loop takes apart",
            fix="use trainer.train(data) with callbacks, or remove graph",
        )


def _without_effect(config: Config, rates: LearningRate) -> list[str]:
    """Settings that only `train()` can honour, with the reason."""
    evaluating = [name for name in ("eval_every", "save_best", "early_stop") if getattr(config, name) is not None]
    if rates.plateau is not None or isinstance(rates.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        evaluating.append("the plateau schedule")
    found = [f"{name} (evaluations are yours: trainer.evaluate)" for name in evaluating]
    if config.profile is not None:
        found.append("profile")
    return found
