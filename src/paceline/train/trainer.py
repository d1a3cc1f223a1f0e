"""The Trainer: a model, an optimizer and settings in; the same training on any number of ranks out.

    trainer = paceline.Trainer(model, optimizer, batch=512)
    history = trainer.train(train_data, val_data, epochs=50)

It never starts processes: under paceline, torchrun, spawn or a group of your own it takes its place in that world, and
in plain python it is one rank.
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from paceline.checkpoint import folder as checkpoints
from paceline.config import derive, show
from paceline.config.recipe import Config
from paceline.data import adopt
from paceline.data.loader import Cut, Loader
from paceline.data.transfer import to_device
from paceline.monitor.metrics import MetricsFile
from paceline.monitor.progress import choose_display
from paceline.optim.build import build_optimizer
from paceline.optim.schedule import Schedule
from paceline.parallel.replicate import replicate, share_buffers, unwrap
from paceline.precision import policy
from paceline.runtime import agreement, collectives, environment, group, seeds
from paceline.train import build, evaluate, loop
from paceline.train.calling import choose_call
from paceline.train.history import History
from paceline.train.recorder import Recorder
from paceline.train.settings import Settings
from paceline.train.step import LossModule, Stepper


class Trainer:
    """See the module's page. `settings` are the recipe's top-level keys; sections are dicts."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        criterion: Callable[..., Any] | None = None,
        device: str | int | torch.device | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        values: dict[str, Any] = dict(settings)
        if isinstance(optimizer, Mapping):
            values["optimizer"] = dict(optimizer)
            optimizer = None
        config = Config.from_dict(values, origin="Trainer's keywords")
        self._set_up(config, model, optimizer, loss_fn, criterion, device)

    @classmethod
    def from_config(cls, config: Config, model: nn.Module | None = None) -> Trainer:
        """A trainer for a recipe. Its model is the recipe's unless one is given; so is its data in `train()`."""
        trainer = cls.__new__(cls)
        trainer._set_up(config, model or build.build_model(config), None, None, None, config.device)
        return trainer

    def _set_up(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: Callable[[Any, Any], Any] | None,
        criterion: Callable[..., Any] | None,
        device: str | int | torch.device | None,
    ) -> None:
        self.config = config
        self.world = group.join(device=device, backend=config.backend, timeout=config.timeout, fallback=config.fallback)
        derive.derive_strategy(config, self.world.size)
        agreement.require_same_recipe(collectives.all_gather_object(config.to_dict()))
        self.model, wrapper = unwrap(model)
        if wrapper:
            self._say(f"model: taken out of its {wrapper}; the Trainer wraps it where the layout needs it")
        self._loss_fn, self._criterion = loss_fn, criterion
        for part in (self.model, criterion):
            if isinstance(part, nn.Module):
                part.to(self.world.device)
                policy.prepare_model(part, config.precision)
        self._own_optimizer = optimizer is None
        self.optimizer = optimizer or build_optimizer(self.model, config.optimizer, config.optimizer.lr)
        left_out = build.check_parameters(self.model, self.optimizer)
        if left_out:
            self._say(f"optimizer: it does not hold {', '.join(left_out)}, which stay as they are")
        self._module = LossModule(self.model)
        self._wrapped = replicate(self._module, self.world.size, self.world.device)
        # From here on the ranks draw differently (dropout), the model being the same on all of them.
        seeds.seed_everything(seeds.mix(config.seed, 1, self.world.place.rank) >> 1)
        self.step_count = 0
        self.epoch = 0
        self._run: Path | None = None
        self._micro_batch: int | None = None
        self._first_step_done = False

    @property
    def is_main_process(self) -> bool:
        return self.world.is_main

    def train(
        self, data: Any = None, val: Any = None, *, epochs: int | None = None, max_steps: int | None = None
    ) -> History:
        """Train until `epochs` or `max_steps`, both counted from the run's beginning. Data defaults to the recipe's."""
        if data is None:
            data, val = build.build_data(self.config)
        if epochs is None and max_steps is None:
            epochs, max_steps = self.config.train.epochs, self.config.train.max_steps
        data = adopt.look_at(data, self.config.seed)
        val = None if val is None else adopt.look_at(val, self.config.seed)
        adopt.require_true_claims(collectives.all_gather_object(adopt.claim(data)))
        batch = derive.derive_batch(self.config, self.world.size, adopt.batch_of(data, self.world.size))
        self._micro_batch = int(batch.micro_batch.value)
        loader = self._loader(data, batch.size, batch.groups)
        schedule = derive.derive_schedule(self.config, batch.size, loader.steps_per_epoch, epochs, max_steps)
        history = History(run=self._open_run({**batch.rows(), **self._schedule_rows(schedule)}))
        total = _total_steps(loader.steps_per_epoch, epochs, max_steps)
        silent = self.config.quiet or not self.is_main_process
        if not self.model.training:  # whoever froze parts of a model in training wants them to stay so
            self.model.train()
        with choose_display(total, self.step_count, silent=silent) as display:
            file = MetricsFile(self._run / "metrics.jsonl") if self._run and self.is_main_process else None
            recorder = Recorder(history, file, display, self.world.device)
            loop.run(self._job(loader, batch, schedule, recorder, val, epochs, max_steps))
        share_buffers(self.model)
        if self._run is not None and history.steps:
            self.save_checkpoint(checkpoints.free_name(self._run / "checkpoints" / f"step-{self.step_count:06d}"))
        return history

    def evaluate(self, data: Any) -> float:
        """The mean loss over `data`, each sample counted once. A matter of all ranks."""
        share_buffers(self.model)
        data = adopt.look_at(data, self.config.seed)
        ranks = self.world.size
        batch = adopt.batch_of(data, ranks) or derive.derive_batch(self.config, ranks).size
        # A loader for evaluation may have a batch size of its own; micro-batches stay no larger than training's.
        groups = -(-batch // (self._micro_batch * ranks)) if self._micro_batch else 1
        micros = self._loader(data, batch, groups, evaluating=True).micros(0, 1)
        return evaluate.evaluate(self._module, self._ready(micros), self.world.device, self.config.seed)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights, whole."""
        return self.model.state_dict()

    def save_checkpoint(
        self, folder: str | Path, include_optimizer: bool = True, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Rank 0 writes and waits for nobody, so it may be called on all ranks or on rank 0 alone."""
        if not self.is_main_process:
            return
        snapshot = checkpoints.Snapshot(
            step=self.step_count,
            epoch=self.epoch,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict() if include_optimizer else None,
            optimizer_kind=type(self.optimizer).__name__,
            metadata=metadata or {},
        )
        checkpoints.write(Path(folder), snapshot)

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Take over weights, optimizer and step; the metadata comes back. A matter of all ranks."""
        collectives.barrier()  # rank 0 may still be writing it
        snapshot = checkpoints.read(Path(folder))
        build.restore(self.model, self.optimizer, snapshot, folder)
        self.step_count, self.epoch = snapshot.step, snapshot.epoch
        return dict(snapshot.metadata)

    def _job(
        self,
        loader: Loader,
        batch: derive.BatchPlan,
        plan: derive.SchedulePlan,
        recorder: Recorder,
        val: Any,
        epochs: int | None,
        max_steps: int | None,
    ) -> loop.Job:
        stepper = Stepper(
            self._module,
            self._wrapped,
            self.optimizer,
            ranks=batch.data_ranks,
            seed=self.config.seed,
            clip_norm=self.config.clip_norm,
        )
        nothing_left = max_steps is not None and self.step_count >= max_steps
        micros = iter(()) if nothing_left else self._ready(loader.micros(self.step_count, epochs))
        return loop.Job(
            micros=micros,
            stepper=stepper,
            optimizer=self.optimizer,
            schedule=self._schedule(plan),
            recorder=recorder,
            evaluate=None if val is None else functools.partial(self.evaluate, val),
            max_steps=max_steps,
            log_every=self.config.log_every,
            eval_every=self.config.eval_every or loader.steps_per_epoch,
            on_step=self._on_step,
        )

    def _on_step(self, step: int, epoch: int) -> None:
        if not self._first_step_done:
            group.shorten_timeout(self.config.timeout)
            self._first_step_done = True
        self.step_count, self.epoch = step, epoch

    def _schedule(self, plan: derive.SchedulePlan) -> Schedule | None:
        for parameters in self.optimizer.param_groups:
            if self._own_optimizer:
                parameters["initial_lr"] = float(plan.lr.value)
            parameters.setdefault("initial_lr", parameters["lr"])
        settings = self.config.schedule
        if not self._own_optimizer and settings.name == "constant" and settings.warmup == 0:
            return None
        return Schedule(settings.name, int(plan.steps.value), int(plan.warmup.value), settings.floor)

    def _schedule_rows(self, plan: derive.SchedulePlan) -> dict[str, derive.Derived]:
        rows = plan.rows()
        if not self._own_optimizer:
            rows["learning rate"] = derive.Derived(float(self.optimizer.param_groups[0]["lr"]), "the optimizer's own")
        return rows

    def _loader(self, data: Any, batch: int, groups: int, *, evaluating: bool = False) -> Loader:
        wish = adopt.Wish(
            batch=batch,
            part=Cut(self.world.place.rank, self.world.size, groups),
            seed=self.config.seed,
            shuffle=self.config.shuffle and not evaluating,
            workers=self.config.workers,
            pin_memory=self.world.device.type == "cuda",
            training=not evaluating,
        )
        return adopt.adopt(data, wish, (lambda text: None) if evaluating else self._say)

    def _ready(self, micros: Any) -> Any:
        """Micro-batches on the device; the first of them decides how the model is called."""
        for micro in to_device(micros, self.world.device, policy.input_cast(self.config.precision)):
            if self._module.call is None:
                self._module.call, rule = choose_call(self.model, micro.batch, self._loss_fn, self._criterion)
                self._say(f"loss: {rule}")
            yield micro

    def _open_run(self, rows: dict[str, derive.Derived]) -> str | None:
        self._say(show.table(rows))
        if self._run is None:
            self._run = build.open_run(self.config, self.model, self.world.is_main)
            if self.world.size == 1 and not environment.was_launched():
                self._say(f"one rank; to start more: paceline launch -n 2 {shlex.join(sys.argv)}")
        if self._run is not None and self.is_main_process:
            build.write_run(self._run, self.config, rows)
        return str(self._run) if self._run else None

    def _say(self, text: str) -> None:
        if self.is_main_process and not self.config.quiet:
            print(text, flush=True)


def _total_steps(per_epoch: int | None, epochs: int | None, max_steps: int | None) -> int | None:
    totals = [] if epochs is None or per_epoch is None else [epochs * per_epoch]
    if max_steps is not None:
        totals.append(max_steps)
    return min(totals, default=None)
