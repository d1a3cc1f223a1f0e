"""The Trainer: a model, an optimizer and settings in; the same training on any number of ranks out.

    trainer = paceline.Trainer(model, optimizer, batch=512)
    history = trainer.train(train_data, val_data, epochs=50)

It never starts processes: under paceline, torchrun, spawn or a group of your own it takes its place in that world, and
in plain python it is one rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from paceline.config.recipe import Config
from paceline.data import adopt
from paceline.data.loader import Loader, MicroBatch
from paceline.errors import TrainError
from paceline.monitor.progress_bar import Display, Silent, choose_display
from paceline.parallel.ddp import broadcast_buffers
from paceline.parallel.shards import gather_full_tensors
from paceline.plan import derived
from paceline.plan.schedule import derive_schedule, total_steps
from paceline.train import evaluate, factory, loop, nonfinite, oom, preflight
from paceline.train.agenda import Agenda
from paceline.train.batch_size_finder import BatchSizeFinder
from paceline.train.callbacks import Callbacks, End, Failed, Start
from paceline.train.checkpointing import run_handle
from paceline.train.checkpointing.entries import training_state
from paceline.train.checkpointing.restorer import Restorer, require_exists
from paceline.train.checkpointing.saver import Saver
from paceline.train.custom_loop import CustomLoop, EpochLoader, StepResult, end_own_loop
from paceline.train.engine import Engine, UserObjects, one_optimizer
from paceline.train.evaluate import Evaluation
from paceline.train.evaluation_policy import EvaluationPolicy
from paceline.train.history import History, Record, require_free_names
from paceline.train.loaders import Loaders
from paceline.train.lr import LearningRate
from paceline.train.rank_poll import RankPoll
from paceline.train.recorder import Recorder, Sinks
from paceline.train.signals import Signals
from paceline.train.trainer_kwargs import TrainerKwargs


class Trainer:
    """See the module's page. `settings` are the recipe's top-level keys; sections are dicts."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        criterion: Callable[..., Any] | None = None,
        scheduler: Any = None,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] = (),
        device: str | int | torch.device | None = None,
        **settings: Unpack[TrainerKwargs],
    ) -> None:
        values: dict[str, Any] = dict(settings)
        if isinstance(optimizer, Mapping):
            values["optimizer"] = dict(optimizer)
            optimizer = None
        one_optimizer(optimizer)
        config = Config.from_dict(values, origin="Trainer's keywords")
        require_free_names(metrics or {}, "metrics")
        task = UserObjects(optimizer, loss_fn, criterion, scheduler, metrics or {})
        self._set_up(config, model, task, callbacks, device)

    @classmethod
    def from_config(
        cls,
        config: Config,
        model: nn.Module | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] = (),
    ) -> Trainer:
        """A trainer for a recipe. Its model is the recipe's unless one is given; so is its data in `train()`."""
        trainer = cls.__new__(cls)
        task = UserObjects(metrics=metrics or {})
        trainer._set_up(config, model or factory.build_model(config), task, callbacks, config.device)
        return trainer

    def _set_up(
        self,
        config: Config,
        model: nn.Module,
        task: UserObjects,
        callbacks: Sequence[Any],
        device: str | int | torch.device | None,
    ) -> None:
        self._callbacks = Callbacks(callbacks)
        # Before the engine touches the GPU.
        finder = BatchSizeFinder(config, model, task, device) if config.micro_batch == "auto" else None
        self._engine = engine = Engine(config, model, task, device)
        self.world, self.model = engine.world, engine.model
        self.optimizer, self.scaler = engine.optimizer, engine.scaler
        self._rates = LearningRate(config, engine.updater, task.scheduler, own_optimizer=engine.own_optimizer)
        self._policy = EvaluationPolicy(config, self._rates, engine.position)
        self._run = run_handle.open(config, engine.world, engine.log, engine.model, engine.telemetry.opened)
        state = training_state(engine, self._rates, self._policy, self._callbacks)
        self._saver = Saver(engine, state, self._run, self._callbacks)
        self._restorer = Restorer(engine, state, self._run, self._saver, self._rates)
        self._sharing = Loaders(engine, finder)
        self._recorder: Recorder | None = None
        self._own: CustomLoop | None = None
        self._restorer.resume()

    @property
    def config(self) -> Config:
        """As set; with what was found out since, such as the micro-batch that fits."""
        return self._engine.config

    @property
    def is_main_process(self) -> bool:
        return self.world.is_main

    @property
    def step_count(self) -> int:
        """Optimizer steps done, counted from the run's beginning."""
        return self._engine.position.step

    @property
    def epoch(self) -> int:
        return self._engine.position.epoch

    def train(
        self, data: Any = None, val: Any = None, *, epochs: int | None = None, max_steps: int | None = None
    ) -> History:
        """Train until `epochs` or `max_steps`, both counted from the run's beginning. Data defaults to the recipe's."""
        if data is None:
            data, val = factory.build_data(self.config)
        if epochs is None and max_steps is None:
            epochs, max_steps = self.config.train.epochs, self.config.train.max_steps
        data = adopt.look_at(data, self.config.seed)
        val = None if val is None else adopt.look_at(val, self.config.seed)
        self._policy.require_evaluations(val is not None)
        loader, batch = self._sharing.training(data)
        self._restorer.check_data(self._sharing.position(loader))
        schedule = derive_schedule(self.config, batch.size, loader.steps_per_epoch, epochs, max_steps)
        history = History(run=self._run.create(self.config, {**batch.rows(), **self._rates.begin(schedule)}))
        total = total_steps(loader.steps_per_epoch, epochs, max_steps)
        if total is not None and self.step_count >= total:
            self._engine.log.info(f"nothing to do: {self.step_count} steps are done, and {total} were asked for")
        if not self.model.training:  # whoever froze parts of a model in training wants them to stay so
            self.model.train()
        silent, log = self.config.quiet or not self.is_main_process, self._engine.log
        sinks = factory.open_sinks(self.config, self._run.folder, self.world)
        self._run.began_at = self.step_count
        with Signals() as signals:
            try:
                with choose_display(total, self.step_count, log, silent=silent) as display, self._engine.draw:
                    poll = RankPoll(self._engine, self._saver, self._run, signals, self.config.save_minutes)
                    job = self._job(loader, history, sinks, display, val, epochs, max_steps, poll)
                    self._run_job(job, history)
            finally:
                sinks.close()
                self._saver.close()
                self._run.release()
            broadcast_buffers(self.model, self._engine.mesh)
            if poll.request:
                signals.end(poll.request)
        return history

    def _run_job(self, job: loop.Job, history: History) -> None:
        self._callbacks.call("on_start", Start(self.step_count, history.run))
        try:
            with oom.explained(self._engine, self._sharing.plan), preflight.named_unused(self.model):
                loop.run(job)
        except BaseException as error:
            self._engine.stepper.reset()
            job.recorder.flush_alone()
            if self.config.checkpoint.on_error and not isinstance(error, KeyboardInterrupt):
                told = self._saver.save_on_error(error)
                if told:
                    self._engine.log.warning(told)
            self._tell_of(error)
            raise
        finally:
            self._recorder = None
        history.ended = job.agenda.reason
        self._callbacks.call("on_end", End(self.step_count, job.agenda.reason))

    def _tell_of(self, error: BaseException) -> None:
        try:
            self._callbacks.call("on_error", Failed(self.step_count, error))
        except Exception as second:  # the first one is what the user has to read
            self._engine.log.warning(f"a callback's on_error failed: {type(second).__name__}: {second}")

    def evaluate(self, data: Any) -> Evaluation:
        """The mean loss over `data`, each sample counted once, and the metrics. A matter of all ranks."""
        loader = self._sharing.whole(data)
        micros = self._engine.ready(loader.micros(0, 1))
        broadcast_buffers(self.model, self._engine.mesh)
        metrics = self._engine.task.metrics
        return evaluate.evaluate(self._engine.module, micros, self._engine.mesh, self.config.seed, metrics)

    def predict(self, data: Any) -> Any:
        """The model's outputs for every sample of `data`, in order, on every rank's CPU. A matter of all ranks."""
        micros = self._engine.on_device(self._sharing.whole(data).micros(0, 1))
        broadcast_buffers(self.model, self._engine.mesh)
        return evaluate.predict(self._engine.module, micros, self._engine.mesh, self.config.seed)

    def training_step(self, batch: Any) -> StepResult:
        """This rank's micro-batch and, when its group is full, the optimizer step: (local loss, whether it stepped)."""
        with oom.explained(self._engine, self._sharing.plan):
            return self._own_loop().training_step(batch)

    def forward(self, batch: Any) -> Tensor:
        with oom.explained(self._engine, self._sharing.plan):
            return self._own_loop().forward(batch)

    def backward(self, loss: Tensor) -> None:
        with oom.explained(self._engine, self._sharing.plan):
            self._own_loop().backward(loss)

    def step(self) -> None:
        self._own_loop().step()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._own_loop().no_sync()

    def loader(self, data: Any) -> EpochLoader:
        """This rank's micro-batches of `data`, an epoch at a time, for one's own loop."""
        loader, batch = self._sharing.training(adopt.look_at(data, self.config.seed))
        self._restorer.check_data(self._sharing.position(loader))
        return EpochLoader(self._own_loop(), loader, batch.groups)

    def enable_gradient_checkpointing(self, kind: str = "full") -> None:
        """From now on blocks are computed again in the backward, as with `recompute: full` in a recipe."""
        self._engine.recompute(kind)

    def log(self, name: str, value: Tensor | float) -> None:
        """Write a value with the next log point: its mean over the steps since the last one, and over the ranks."""
        require_free_names([name], "trainer.log")
        (self._recorder or self._own_loop().recorder).log(name, value)

    def stop(self) -> None:
        """End training at the next log point, on every rank. Any rank may call it."""
        if self._recorder is not None:
            self._recorder.stop_wished = True

    def ema_weights(self) -> AbstractContextManager[None]:
        """Within this context the model has the averaged weights."""
        if self._engine.average is None:
            raise TrainError("no-ema", "There are no averaged weights.", fix="Trainer(…, ema=0.999), or ema: 0.999")
        self._saver.wait_for_copy()  # a save that is still copying wants the weights as they are
        return self._engine.average.swapped()

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights, whole, on rank 0; where they are cut over ranks, all ranks have to come and the others
        get nothing."""
        state = self.model.state_dict()
        return state if self._engine.sharded is None else gather_full_tensors(state, self._engine.mesh)

    def save_checkpoint(
        self,
        folder: str | Path,
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """On the disk when this returns. Where every rank holds the whole model rank 0 writes and waits for nobody, so
        it may be called on all ranks or on rank 0 alone; where it is cut over ranks all of them have to come."""
        self._saver.write(Path(folder), include_optimizer=include_optimizer, metadata=metadata, overwrite=overwrite)

    def load_checkpoint(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Take over weights, optimizer, position and random state; the metadata comes back. A matter of all ranks.

        `path` is a checkpoint's folder, a run's (its newest good one), or a file of weights (.pt, .pth, .safetensors).
        """
        return self._restorer.load(require_exists(path), weights_only=weights_only)

    def _job(
        self,
        loader: Loader,
        history: History,
        sinks: Sinks,
        display: Display,
        val: Any,
        epochs: int | None,
        max_steps: int | None,
        poll: RankPoll,
    ) -> loop.Job:
        engine, config = self._engine, self.config
        self._recorder = recorder = self._new_recorder(history, sinks, display)
        agenda = Agenda(
            recorder,
            self._callbacks,
            engine.position,
            log_every=config.log_every,
            began_at=self.step_count,
            max_steps=max_steps,
            steps_per_epoch=loader.steps_per_epoch,
            eval_every=config.eval_every,
            save_every=config.save_every if self._run.folder is not None else None,
            profiler=factory.open_profiler(config, self._run.folder, self.world),
            end_of_epoch=self._rates.epoch_ended,
            evaluate=None if val is None else partial(self._evaluated, recorder, val),
            save=self._saver.save,
            save_last=self._save_last if config.save_last else lambda step: self._saver.finish(tolerate_failure=False),
            poll=poll,
            on_nonfinite=lambda record: self._nonfinite(self._read_again(loader, record["step"] - 1), record),
        )
        nothing_left = max_steps is not None and self.step_count >= max_steps
        on_step = self._callbacks.hooks["on_step"]

        def micros() -> Iterator[MicroBatch]:
            return iter(()) if nothing_left else self._first_checked(loader, recorder, epochs)

        parts = (engine.stepper, engine.updater, recorder, agenda, engine.position, display, on_step, engine.telemetry)
        return loop.Job(micros, *parts)

    def _save_last(self, step: int) -> None:
        broadcast_buffers(self.model, self._engine.mesh)
        self._saver.save_last(step)

    def _new_recorder(self, history: History, sinks: Sinks, display: Display) -> Recorder:
        engine = self._engine
        return Recorder(history, sinks, display, self.world.device, self._callbacks, engine.is_bad, engine.log)

    def _first_checked(self, loader: Loader, recorder: Recorder, epochs: int | None) -> Iterator[MicroBatch]:
        """The micro-batches to come, the first of which goes through the pre-flight before it is trained on."""
        micros = self._engine.telemetry.record_suspects(self._engine.ready(loader.micros(self.step_count, epochs)))
        first = next(micros, None)
        if first is None:
            return micros
        assert self._sharing.plan is not None
        self._engine.check(first, self._sharing.plan.groups, loader.fingerprint)
        recorder.tokens_per_sample = factory.tokens_per_sample(first.batch)
        recorder.begin()
        return chain([first], micros)

    def _evaluated(self, recorder: Recorder, val: Any, step: int, epoch: int, due: bool) -> str | None:
        with self._engine.telemetry.evaluating():
            record: Record = {"step": step, "epoch": epoch, **self.evaluate(val).values}
            if self._engine.average is not None:
                with self.ema_weights():
                    record |= {f"ema_{name}": value for name, value in self.evaluate(val).values.items()}
        verdict = self._policy.of(record, due)
        recorder.evaluation(verdict.record)
        if verdict.is_best:  # last: what it saves has to know all of the above
            self._saver.save_best(step)
        return verdict.reason

    def _read_again(self, loader: Loader, step: int) -> Iterator[MicroBatch] | None:
        return self._engine.ready(loader.micros(step, None)) if loader.repeatable else None

    def _nonfinite(self, again: Iterator[MicroBatch] | None, record: Record, *, ends: bool = True) -> str | None:
        """The step was not finite: raise, or end training, where that is ours. (`skip` has left such steps out.)"""
        engine = self._engine
        micros = None if again is None else factory.of_one_step(again)
        error = nonfinite.report(record, engine.module, micros, engine.draw, engine.watch)
        if self.config.nonfinite == "raise" or not ends:
            raise error
        engine.log.warning(str(error))
        return f"step {record['step']} was not finite (nonfinite: stop)"

    def _own_loop(self) -> CustomLoop:
        if self._own is None:
            if isinstance(self.config.run, str):  # a loop of one's own writes only where it was told to
                self._run.create(self.config)
            if not self.model.training:
                self.model.train()
            sinks = factory.open_sinks(self.config, self._run.folder, self.world)
            display, engine = Silent(self.step_count), self._engine
            recorder = self._new_recorder(History(), sinks, display)
            agenda = Agenda(
                recorder,
                self._callbacks,
                engine.position,
                log_every=self.config.log_every,
                end_of_epoch=self._rates.epoch_ended,
                on_nonfinite=lambda record: self._nonfinite(own.read_again(record["step"] - 1), record, ends=False),
            )
            hooks = self._callbacks.hooks["on_step"]
            parts = (engine.stepper, engine.updater, recorder, agenda, engine.position, display, hooks)
            job = loop.Job(lambda: iter(()), *parts, engine.telemetry)
            self._own = own = CustomLoop(engine, job, self._begin_own_loop)
            weakref.finalize(own, end_own_loop, recorder, sinks)
        return self._own

    def _begin_own_loop(self, steps_per_epoch: int | None) -> None:
        """At its first step, when it is known what it trains on."""
        config = self.config
        ends = (config.train.epochs, config.train.max_steps)
        plan = derive_schedule(config, self._sharing.batch, steps_per_epoch, *ends, endless=True)
        rows = {**(self._sharing.plan.rows() if self._sharing.plan else {}), **self._rates.begin(plan)}
        self._run.create(config, rows) if self._run.folder is not None else self._engine.log.info(derived.table(rows))
