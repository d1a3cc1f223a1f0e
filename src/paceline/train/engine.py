"""The parts that every height of the Trainer works with, put together in one written order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from paceline.config import derive
from paceline.config.recipe import Config
from paceline.data.loader import Micro
from paceline.data.transfer import to_device
from paceline.errors import TrainError
from paceline.optim.build import build_optimizer, fill_momentum
from paceline.optim.ema import Average
from paceline.parallel.batchnorm import left_alone, synchronise
from paceline.parallel.devices import DataParallel, gpus
from paceline.parallel.replicate import replicate, unwrap
from paceline.precision import policy
from paceline.precision.scaler import Scaler
from paceline.runtime import agreement, collectives, group, seeds
from paceline.runtime.noise import drawing
from paceline.train import build, preflight
from paceline.train.calling import choose_call
from paceline.train.loop import Position
from paceline.train.nonfinite import Watch, is_fused, judge
from paceline.train.step import LossModule, Stepper
from paceline.train.update import Updater


@dataclass
class Task:
    """What the user gives as objects, beside the model."""

    optimizer: torch.optim.Optimizer | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    criterion: Callable[..., Any] | None = None
    scheduler: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """A model, its optimizer and what stands between them, on this rank."""

    def __init__(self, config: Config, model: nn.Module, task: Task, device: str | int | torch.device | None) -> None:
        self.config, self.task = config, task
        self.world = group.join(device=device, backend=config.backend, timeout=config.timeout, fallback=config.fallback)
        derive.derive_strategy(config, self.world.size)
        agreement.require_same_recipe(collectives.all_gather_object(config.to_dict()))
        self.model, wrapper = unwrap(model)
        if wrapper:
            self.say(f"model: taken out of its {wrapper}; the Trainer wraps it where the layout needs it")
        _set_switches(config, self.world.device)
        self._place_model()
        self._build_optimizer()
        self.scaler = Scaler(self.world.device, config.scaler, enabled=config.precision == "fp16")
        self.average: Average | None = None
        self._build_step()
        # From here on the ranks draw differently (dropout), the model being the same on all of them.
        seeds.seed_everything(seeds.mix(config.seed, 1, self.world.place.rank) >> 1)
        self.position = Position()
        self._checked = False

    def _place_model(self) -> None:
        config, device = self.config, self.world.device
        for part in (self.model, self.task.criterion):
            if isinstance(part, nn.Module):
                part.to(device)
                policy.prepare_model(part, config.precision)
        if self.world.size > 1 and config.sync_batchnorm:
            changed = synchronise(self.model)
            if changed:
                self.say(f"batch norm: {len(changed)} layers count the samples of all ranks (sync_batchnorm)")
            others = left_alone(self.model)
            if others:
                self.warn(
                    f"{', '.join(others[:4])}: a batch norm with a forward of its own counts each rank's samples only"
                )
        if config.compile:
            self.model.compile()

    def _build_optimizer(self) -> None:
        given = self.task.optimizer
        self.own_optimizer = given is None
        self.optimizer = given or build_optimizer(self.model, self.config.optimizer, self.config.optimizer.lr)
        left_out = build.check_parameters(self.model, self.optimizer)
        fill_momentum(self.optimizer)
        if left_out:
            self.say(f"optimizer: it does not hold {', '.join(left_out)}, which stay as they are")

    def _build_step(self) -> None:
        config, device = self.config, self.world.device
        self.module = LossModule(self.model, policy.forward_context(config.precision, device))
        self.wrapped = self._wrap()
        if config.ema is not None:  # after the wrap, which gives every rank the weights of rank 0
            self.average = Average(self.model, config.ema.decay, config.ema.warmup)
        self.draw = drawing(config.seed)
        watched = config.nonfinite != "skip" and not self.scaler.is_enabled()
        self.watch = Watch(self.optimizer, device, may_wait=config.nonfinite == "stop") if watched else None
        self.is_bad = judge(config.nonfinite, scaled=self.scaler.is_enabled())
        self.stepper = Stepper(
            self.module,
            self.wrapped,
            ranks=self.world.size,
            draw=self.draw,
            scaler=self.scaler,
            # One rank that holds its weights while others go on is an end; `stop` goes by what all ranks see.
            watch=self.watch if config.nonfinite == "raise" else None,
        )
        self.updater = Updater(
            self.optimizer,
            self.module,
            scaler=self.scaler,
            average=self.average,
            clip_norm=config.clip_norm,
            clip_value=config.clip_value,
            nonfinite=config.nonfinite,
            watch=self.watch,
        )
        if config.nonfinite != "raise" and device.type != "cpu" and not is_fused(self.optimizer):
            self.say(f"nonfinite: {config.nonfinite} waits for the GPU at every step, as the optimizer is not fused")

    def _wrap(self) -> nn.Module:
        config, device = self.config, self.world.device
        if config.strategy == "dp":
            found = gpus()
            if len(found) > 1:
                self.say(f"dp: one process, {len(found)} GPUs; `paceline launch` with strategy: ddp is faster")
                return DataParallel(self.module, found)
            self.say(
                f"dp: {'one GPU' if found else 'no GPU'}, so the model runs on {device} as it is; for several, "
                "each with its own Python: paceline launch -n 2 with strategy: ddp"
            )
        allow_unused = config.unused_parameters == "allow"
        return replicate(self.module, self.world.size, device, config.ddp, allow_unused=allow_unused)

    def on_device(self, micros: Iterator[Micro]) -> Iterator[Micro]:
        return to_device(micros, self.world.device, policy.input_cast(self.config.precision))

    def ready(self, micros: Iterator[Micro]) -> Iterator[Micro]:
        """Micro-batches on the device; the first of them decides how the model is called."""
        on_device = self.on_device(micros)
        if self.module.call is not None:
            return on_device
        first = next(on_device, None)
        if first is None:
            return on_device
        self.choose_call(first.batch)
        return chain([first], on_device)  # rather than a generator: a step pays for each

    def choose_call(self, batch: Any) -> None:
        call = choose_call(self.model, batch, self.task.loss_fn, self.task.criterion)
        # Ranks see different batches, and have to come to the same rule.
        weighed = any(collectives.all_gather_object(call.weighed is not None and call.should_weigh))
        self.module.call = call.as_weighed() if weighed else call
        self.say(f"loss: {self.module.call.rule}")

    def check(self, micro: Micro, groups: int, fingerprint: Callable[[], Any]) -> None:
        """The pre-flight, once, before the first step. Needs `drawing` to be entered."""
        if self._checked or not self.config.preflight:
            return
        several = self.world.size > 1
        weight, unused = preflight.check(
            self.module,
            self.wrapped,
            micro,
            self.draw,
            fingerprint=fingerprint() if several else None,
            allow_unused=self.config.unused_parameters == "allow",
        )
        self._checked = True
        self.stepper.nominal = preflight.nominal(weight, groups)
        group.shorten_timeout(self.config.timeout)  # what compiles has compiled
        if unused and not several and self.config.unused_parameters == "error":
            self.warn(f"the loss does not depend on {', '.join(unused[:8])}: on several ranks this would be an error")
        self.say(
            f"pre-flight: {self.world.size} rank{'s' if several else ''} ready; the first micro-batch weighs {weight:g}"
        )

    @contextmanager
    def off_the_device(self) -> Iterator[None]:
        """The GPU's memory for others."""
        self.model.to("cpu")
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            self.model.to(self.world.device)

    def say(self, text: str) -> None:
        if self.world.is_main and not self.config.quiet:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        if self.world.is_main:
            print(f"warning: {text}", flush=True)


def one_optimizer(optimizer: Any) -> None:
    """Several optimizers, or something else, are refused before anything is built."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainError(
            "needs-closure",
            "LBFGS evaluates the loss several times in one step.",
            why="a step here is one pass over its micro-batches, on all ranks at the same time",
            fix="use another optimizer",
        )
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, (list, tuple, set)):
        raise TrainError(
            "several-optimizers",
            f"The Trainer got {len(optimizer)} optimizers.",
            why="a step is one update of one model: clipping, schedule and skipped steps hold for all its weights",
            fix="use one optimizer with parameter groups; for adversarial training two Trainers in a loop of your own "
            "(trainer.forward, backward, step)",
        )
    raise TrainError(
        "not-an-optimizer",
        f"optimizer is a {type(optimizer).__name__}.",
        fix='give a torch.optim.Optimizer, or settings: optimizer={"name": "adamw", "lr": 1e-3}',
    )


def _set_switches(config: Config, device: torch.device) -> None:
    """torch's switches are the process's: there is no narrower place for them."""
    if config.tf32:
        policy.allow_tf32(True)
    if config.deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
