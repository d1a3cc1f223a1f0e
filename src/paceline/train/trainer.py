"""The Trainer: trains a model with the same result on any number of ranks.

    trainer = paceline.Trainer(model, optimizer, batch=512)
    history = trainer.train(train_data, val_data, epochs=50)

It never starts processes. Under paceline, torchrun, spawn or an existing process group it uses that world; in a plain
Python process it is a world of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Unpack

import torch
from torch import nn

from paceline.config.recipe import Config
from paceline.config.validation import KEYWORDS
from paceline.data import adopt
from paceline.data.input_hints import explain_dtypes
from paceline.data.loader import Loader, MicroBatch
from paceline.models.usage_errors import explain_no_gradient
from paceline.monitor.progress_bar import Display, choose_display
from paceline.parallel.data_parallel import Reduce, broadcast_buffers
from paceline.plan.schedule import derive_schedule, pause_step
from paceline.run.history import History, Record
from paceline.train import first_step, loop, oom, recipe_objects, trainer_kwargs
from paceline.train.build_engine import build_engine
from paceline.train.callbacks import Callbacks, End, Failed, Start
from paceline.train.checkpointing import run_handle
from paceline.train.checkpointing.entries import training_state
from paceline.train.checkpointing.restorer import Restorer
from paceline.train.checkpointing.saver import Saver
from paceline.train.checks import preflight
from paceline.train.checks.wrapped_model import check_comm_hook
from paceline.train.custom_loop import CustomLoop
from paceline.train.custom_loop_methods import open_custom_loop
from paceline.train.evaluate import EvaluationPolicy
from paceline.train.features import nonfinite
from paceline.train.loaders import Loaders
from paceline.train.loop import StepActions
from paceline.train.oom import BatchSizeFinder
from paceline.train.random_numbers import dropout_rows
from paceline.train.rank_poll import Interrupted, RankPoll, Signals
from paceline.train.recipe_objects import MetricsLike, build_metrics, drop_inherited_options, split_metrics
from paceline.train.recorder import Recorder, Sinks
from paceline.train.trainer_kwargs import DeviceLike, UserObjects
from paceline.train.trainer_methods import TrainerMethods
from paceline.train.weights_view import weights_view


@trainer_kwargs.document_settings
class Trainer(TrainerMethods, trainer_kwargs.MethodHints):
    """Trains a model with the same result on any number of ranks.

    It never starts processes: under paceline, torchrun, spawn or an existing process group it uses that world; in a
    plain Python process it is a world of one rank. Settings are the top-level keys of a recipe, with sections as dicts,
    or as their main value: `ema=0.999` is short for `ema={"decay": 0.999}`. The examples of the methods continue the
    one below.

    Args:
        model: a module that returns a loss, unless there is a `loss_fn` or a `criterion`
        optimizer: a torch optimizer for the parameters of the model; or the settings of one, such as
            `{"name": "adamw", "lr": 1e-3}`, or its name. Default: AdamW
        loss_fn: computes the loss of a micro-batch, as `loss_fn(model, batch)`
        criterion: computes the loss from the output of the model and the target, as `criterion(output, target)`
        scheduler: a torch learning rate scheduler of the optimizer, instead of `schedule`
        metrics: functions of (outputs, targets) by name, or torchmetrics objects, for evaluations
        collate_fn: makes a batch of a list of samples, for every dataset that is not in a DataLoader
        callbacks: objects with hooks such as `on_step(record)`
        device: `"cpu"`, `"cuda"`, `"cuda:1"` or the index of a GPU. Default: one GPU for each rank, if available
        comm_hook: reduces gradients, called as `comm_hook(comm_state, bucket)` like a hook of DDP; returns a future of
            the mean over ranks
        comm_state: the first argument of `comm_hook`
        settings: see below

    Settings:
        {settings}

    Attributes:
        model: the model that was passed
        optimizer: the optimizer
        scaler: the loss scaler of fp16
        world: rank, world size and device of this process

    Raises:
        ConfigError: `config.unknown-key`, `config.bad-value`, `config.contradiction`: a setting is invalid
        LayoutError: the layout does not fit the model, the settings or the ranks; `layout.degrees-and-world`,
            `layout.wrapped-model`
        TrainError: `train.not-an-optimizer`, `train.other-parameters`, `train.nothing-to-train`
        WorldError: `world.no-rendezvous`, `world.different-recipes`: ranks do not find each other, or differ

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> import paceline
        >>> data = TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
        >>> trainer = paceline.Trainer(nn.Linear(4, 1), criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
        >>> history = trainer.train(data, epochs=1)
        >>> len(history.steps), history.losses[-1] < history.losses[0]
        (4, True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, Any] | str | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        criterion: Callable[..., Any] | None = None,
        scheduler: Any = None,
        metrics: MetricsLike = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        callbacks: Sequence[Any] = (),
        device: str | int | torch.device | None = None,
        comm_hook: Reduce | None = None,
        comm_state: Any = None,
        **settings: Unpack[trainer_kwargs.TrainerKwargs],
    ) -> None:
        values: dict[str, Any] = dict(settings)
        if isinstance(optimizer, (Mapping, str)):
            values["optimizer"], optimizer = optimizer, None
        trainer_kwargs.check_arguments(model, optimizer, loss_fn, criterion, scheduler)
        values["metrics"], functions = split_metrics(metrics)
        config = Config.from_dict(values, origin=KEYWORDS)
        hook = check_comm_hook(comm_hook, comm_state)
        called, measured = Callbacks(callbacks), build_metrics(config, functions, model, criterion)
        task = UserObjects(optimizer, loss_fn, criterion, scheduler, measured, collate_fn, hook, called)
        self._set_up(config, model, task, device)

    @classmethod
    def from_config(
        cls,
        config: Config,
        model: nn.Module | None = None,
        *,
        metrics: MetricsLike = None,
        callbacks: Sequence[Any] = (),
    ) -> Trainer:
        """Create a Trainer from a recipe.

        Args:
            config: the recipe
            model: default: the model of the recipe
            metrics: functions of (outputs, targets) by name, or torchmetrics objects
            callbacks: objects with hooks such as `on_step(record)`

        Returns:
            The Trainer. Its `train()` uses the data of the recipe by default.

        Raises:
            ConfigError: `config.missing-section`: the recipe has no model; and those of `Trainer`

        Example:
            >>> recipe = {"model": {"name": "mlp", "inputs": 4}, "batch": 8, "run": False, "quiet": True}
            >>> paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).step_count
            0
        """
        trainer = cls.__new__(cls)
        config, notes = drop_inherited_options(config)
        model = model or recipe_objects.build_model(config)
        called, measured = Callbacks(callbacks), build_metrics(config, metrics, model)
        task = UserObjects(metrics=measured, callbacks=called, notes=notes)
        trainer._set_up(config, model, task, config.device)
        return trainer

    def _set_up(self, config: Config, model: nn.Module, task: UserObjects, device: DeviceLike) -> None:
        self._callbacks = task.callbacks
        # Before the engine initializes CUDA.
        finder = BatchSizeFinder(config, model, task, device) if config.micro_batch == "auto" else None
        self._engine = engine = build_engine(config, model, task, device)
        self.world, self.model = engine.world, engine.parts.model
        self.optimizer, self.scaler = engine.bound.optimizer, engine.bound.scaler
        self._rates = engine.features.schedule
        self._policy = EvaluationPolicy(config, self._rates, engine.position)
        about = (engine.world, engine.log, engine.parts.model, engine.position)
        self._run = run_handle.open(config, *about, engine.telemetry.opened)
        self._weights = weights_view(engine)
        state = training_state(engine, self._weights, self._policy, self._callbacks)
        self._saver = Saver(engine, state, self._run, self._callbacks)
        self._restorer = Restorer(engine, state, self._run, self._saver, self._rates)
        self._loaders = Loaders(engine, finder)
        self._recorder: Recorder | None = None
        self._custom_loop: CustomLoop | None = None
        self._warn_once = cache(engine.log.warning)
        self._restorer.resume()

    @property
    def config(self) -> Config:
        """The recipe, with the values determined at run time, such as the size found by `micro_batch: auto`."""
        return self._engine.config

    @property
    def device(self) -> torch.device:
        """The device of this rank, on which micro-batches and the model are."""
        return self.world.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def step_count(self) -> int:
        """Optimizer steps since the beginning of the run."""
        return self._engine.position.step

    @property
    def epoch(self) -> int:
        """The current epoch, starting at 0; after its last batch, the next one: `range(trainer.epoch, epochs)`."""
        return self._engine.position.current_epoch

    @trainer_kwargs.hinted
    def train(
        self, data: Any = None, val: Any = None, *, epochs: int | None = None, max_steps: int | None = None
    ) -> History:
        """Train until `epochs` or `max_steps`. Collective: must be called on every rank.

        Args:
            data: a Dataset, whose samples the Trainer shuffles and shards; a DataLoader, whose batch size is the global
                batch; or an iterable of global batches. Default: the data of the recipe
            val: data to evaluate on, after each epoch or every `eval_every` steps; or a dict of several by name
            epochs: where to stop, counted from the beginning of the run, so that a resumed run stops at the same step
            max_steps: the same in optimizer steps

        Returns:
            The records of this call, equal on every rank.

        Raises:
            ConfigError: `config.no-end`: neither `epochs` nor `max_steps` ends training
            DataError: `data.not-data`, `data.empty`, `data.different-data`: the data can't be used, or differs
            TrainError: `train.nonfinite`, `train.no-loss`, `train.unused-parameters`, `train.out-of-memory`

        Example:
            >>> history = trainer.train(data, data, epochs=2)
            >>> history.evaluations[-1]["step"]
            8
        """
        if data is None:
            data, val = recipe_objects.build_data(self.config)
        if epochs is None and max_steps is None:
            epochs, max_steps = self.config.train.epochs, self.config.train.max_steps
        data = adopt.recognize(data, self.config.seed)
        val = adopt.sets_in(val, self.config.seed)
        self._policy.require_evaluations(bool(val))
        loader, batch = self._loaders.training(data)
        ends = [steps for steps in (loader.lengths.before(epochs), max_steps) if steps is not None]
        facts = self._loaders.facts(data, loader)
        other = self._loaders.is_other_stream(data, loader)
        self._restorer.check_data(self._loaders.position(loader), facts, min(ends, default=None), other=other)
        loader = self._loaders.placed(loader)
        per_epoch, in_epochs = loader.lengths.per_epoch, loader.lengths.before(epochs)
        schedule = derive_schedule(self.config, batch.size, per_epoch, epochs, max_steps, in_epochs=in_epochs)
        rows = {**batch.rows(), **self._rates.begin(schedule, self.step_count, epochs, self._engine.log.warning)}
        rows |= dropout_rows(self.config, self.model, self._engine.draw)
        chosen, best = self.config.save_best, self._policy.best
        metric, mode = ("loss", "min") if chosen is None or best is None else (chosen.metric, best.mode)
        history = History(run=self._run.create(self.config, rows), metric=metric, mode=mode)
        total = min((steps for steps in (in_epochs, max_steps) if steps is not None), default=None)
        pause = pause_step(self.config.train.pause_at, total)
        if not self.model.training:  # submodules in eval mode of a model in train mode stay as they are
            self.model.train()
        silent, log = self.config.quiet or not self.is_main_process, self._engine.log
        sinks = self._run.open_sinks(self.config)
        self._run.began_at = self.step_count
        ended = self._engine.telemetry.ended
        with Signals(partial(ended, None)) as signals:
            try:
                with choose_display(total, self.step_count, log, silent=silent) as display, self._engine.draw:
                    self._recorder = recorder = self._new_recorder(history, sinks, display)
                    poll = RankPoll(self._engine, self._saver, self._run, signals, self.config.save_minutes)
                    job = self._job(loader, recorder, val, epochs, max_steps if pause is None else pause, poll)
                    job.actions.is_pause = pause is not None
                    self._run_job(job, history)
                ended(None, poll.request)
            except BaseException as error:
                ended(error)
                raise
            finally:
                sinks.close()
                self._saver.close()
                self._run.close(self.config)
            for end in self._engine.hooks.end if not poll.request else ():
                end()
            broadcast_buffers(self.model, self._engine.mesh)
            if poll.request:
                signals.end(poll.request)
        if self.step_count == self._run.began_at:
            end = total if pause is None else pause
            past = end is not None and self.step_count >= end
            limits = "epochs and max_steps, counted from its beginning, end it" if pause is None else "pause_at ends it"
            why = f"{limits} at {end}" if past else history.ended
            log.warning(f"train() took no step: the run is at step {self.step_count} ({why})")
        return history

    def _run_job(self, job: loop.Job, history: History) -> None:
        self._callbacks.call("on_start", Start(self.step_count, history.run))
        try:
            with (
                oom.explain_out_of_memory(self._engine, self._loaders.plan),
                preflight.explain_unused_parameters(self.model),
                preflight.explain_backward(),
                explain_no_gradient(self.model),
                explain_dtypes(self.model),
            ):
                loop.run(job)
        except BaseException as error:
            self._engine.stepper.reset()
            recorded = job.recorder.try_flush_last()
            if self.config.checkpoint.on_error and not isinstance(error, KeyboardInterrupt):
                message = self._saver.save_on_error(error, recorded=recorded)
                if message:
                    self._engine.log.warning(message)
            self._callbacks.report(Failed(self.step_count, error), self._engine.log)
            raise
        finally:
            self._recorder = None
        history.ended = job.actions.reason
        self._callbacks.call("on_end", End(self.step_count, job.actions.reason))

    def _job(
        self, loader: Loader, recorder: Recorder, val: Any, epochs: int | None, max_steps: int | None, poll: RankPoll
    ) -> loop.Job:
        engine, config = self._engine, self.config
        actions = StepActions(
            recorder,
            self._callbacks,
            engine.position,
            log_every=config.log_every,
            began_at=self.step_count,
            max_steps=max_steps,
            steps_per_epoch=loader.lengths.per_epoch,
            epochs_from=engine.position.begins.skip,
            eval_every=config.eval_every,
            save_every=config.save_every if self._run.folder is not None else None,
            profiler=recipe_objects.open_profiler(config, self._run.folder, self.world),
            end_of_epoch=self._rates.epoch_ended,
            evaluate=partial(self._evaluated, recorder, val, poll) if val else None,
            is_evaluated=self._run.is_evaluated,
            checks=lambda: engine.stepper.checks,
            save=poll.save,
            save_last=self._save_last if config.save_last else poll.finish,
            poll=poll,
            on_nonfinite=partial(self._nonfinite, loader),
        )

        def micros() -> Iterator[MicroBatch]:
            assert self._loaders.plan is not None
            if max_steps is not None and self.step_count >= max_steps:
                return iter(())
            checked = first_step.checked_micros(engine, loader, recorder, self._loaders.plan.groups, epochs)
            with recorder.paused():
                self._policy.try_once(val, self._measure)
            return checked

        return loop.Job(micros, engine, recorder, actions, self._callbacks.hooks["on_step"])

    def _save_last(self, step: int) -> None:
        broadcast_buffers(self.model, self._engine.mesh)
        self._saver.save_last(step)

    def _new_recorder(self, history: History, sinks: Sinks, display: Display) -> Recorder:
        engine, features = self._engine, self._engine.features
        parts = (self.world.device, self._callbacks, engine.is_bad, engine.log, features.replicas, features.rates)
        return Recorder(history, sinks, display, *parts)

    def _evaluated(self, recorder: Recorder, val: Any, poll: RankPoll, step: int, epoch: int, due: bool) -> str | None:
        try:
            with self._engine.telemetry.evaluating():
                record: Record = {"step": step, "epoch": epoch, **self._measure(val, poll.reading)}
        except Interrupted:  # a resumed run repeats this evaluation
            return poll(step, lambda: None)
        verdict = self._policy.apply(record, due)
        recorder.evaluation(verdict.record)
        if verdict.is_best:  # last, so that the checkpoint includes all of the above
            self._saver.save_best(step)
        return verdict.reason

    def _nonfinite(self, loader: Loader | None, record: Record, seen: bool, *, may_stop: bool = True) -> str | None:
        """Handle a non-finite step: raise, or return the reason to stop. (`skip` has skipped such steps.)"""
        engine, micros = self._engine, None
        if loader is not None and loader.repeatable:
            micros = engine.ready(loader.micros(record["step"] - 1, None))
        seen = seen and not self.config.fixed_order  # the loss of a step is then that of all ranks
        error = nonfinite.report(record, engine.parts.module, micros, engine.draw, seen=seen)
        engine.reset_features()
        if self.config.nonfinite == "raise" or not may_stop:
            raise error
        engine.log.warning(str(error))
        return f'non-finite step {record["step"]} (nonfinite="stop")'

    def _get_custom_loop(self) -> CustomLoop:
        if self._custom_loop is None:
            shared = (self._engine, self._run, self._saver, self._rates, self._loaders, self._callbacks)
            self._custom_loop = open_custom_loop(*shared, partial(self._nonfinite, may_stop=False))
        return self._custom_loop
