"""Checks before the first step, and some later: does it mean the same on other ranks and with other micro-batches?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from math import ceil
from time import perf_counter
from typing import Any

import torch

from paceline.data.loader import Loader, MicroBatch
from paceline.errors import TrainError
from paceline.guard import forward_state, kept_state, loss_halves, preflight
from paceline.guard.gradient_hooks import BackwardWatch
from paceline.guard.random_draws import LateDraws, describe_draws
from paceline.models.divisor import Divisor
from paceline.parallel.replicas import Replicas
from paceline.runtime import collectives
from paceline.text import plural
from paceline.train import bucket_size, factory, standstill
from paceline.train.engine import Engine
from paceline.train.evaluate import run_loss
from paceline.train.local_replicas import replicas_differ
from paceline.train.pipeline_step import PipelineLossModule, PipelineStepper
from paceline.train.recorder import Recorder
from paceline.train.step import Stepper

_FIRST, _SHARE = 8, 200  # steps after which a later check takes at most this part of the time


def checked_micros(
    engine: Engine, loader: Loader, recorder: Recorder, groups: int, epochs: int | None
) -> Iterator[MicroBatch]:
    """The remaining micro-batches, after the checks with the first of them."""
    micros = engine.telemetry.record_suspects(engine.ready(loader.micros(engine.position.step, epochs)))
    first = next(micros, None)
    if first is None:
        return micros
    check(engine, first, groups, loader.fingerprint)
    recorder.tokens_per_sample = factory.tokens_per_sample(first.batch)
    recorder.begin(loader.input, groups)
    return chain([first], micros)


def check(engine: Engine, micro: MicroBatch, groups: int, fingerprint: Callable[[], Any]) -> None:
    """Run the pre-flight, once, before the first step. Must be called within `engine.draw`."""
    config, stepper = engine.config, engine.stepper
    if engine.checked or not config.preflight:
        return
    if groups > 1 or engine.updater.gradient_hooks is not None:
        engine.defer_hooks()
    if engine.world.size == 1:
        bucket_size.choose(engine, micro)
        _check_in_first_step(engine, micro, groups)
        _compare_halves(engine, micro, groups)
        return
    stepper.weigh(several=groups > 1)
    replicas, watch = engine.wrapped.forward, BackwardWatch(engine.model)
    with (
        replicas.without_hook() if isinstance(replicas, Replicas) else nullcontext(),
        nullcontext() if config.compile else watch,  # a mode would be compiled into the graph
    ):
        weight, depends, (own, counted) = preflight.check(
            engine.module,
            engine.wrapped,
            micro,
            engine.mesh,
            engine.draw,
            fingerprint=fingerprint(),
            allow_unused=config.unused_parameters == "allow",
            user_code=[engine.task.criterion, engine.task.loss_fn],
            compiled=bool(config.compile),
            same_weights=not replicas_differ(engine.local_steps),
            run_zero_weight=stepper.run_zero_weight if isinstance(stepper, PipelineStepper) else None,
        )
    engine.checked = True
    stepper.nominal = preflight.nominal(weight, groups)
    stepper.per_sample = preflight.power_of_two(weight * groups / micro.step_samples)
    if _start_from_global_mean(engine, watch, weight * groups / micro.step_samples):
        depends = False  # the weight of a step is reduced before its backward
    if depends and type(stepper) is Stepper and isinstance(replicas, Replicas) and replicas.carry_weight():
        code = [engine.task.criterion, engine.task.loss_fn]
        engine.draw.begin(micro)
        preflight.warm_up(engine.model, replicas.trial, micro.batch, engine.draw, code)
        engine.draw.end()
    bucket_size.choose(engine, micro)
    _compare_halves(engine, micro, groups, [*own, *counted])
    _name_draws(engine, micro, engine.log.warning)
    several = groups > 1 or engine.mesh.degrees.pipeline > 1 or config.fixed_order
    forward_state.warn_of_buffers(own, counted, engine.warn, several=several)
    standstill.shorten_timeout(config.timeout)  # compilation is done
    if engine.traffic is not None:
        engine.traffic.take()  # only bytes of steps are recorded
    engine.log.info(f"pre-flight passed on {plural(engine.world.size, 'rank')}")


def _start_from_global_mean(engine: Engine, watch: BackwardWatch, weight_per_sample: float) -> bool:
    """Do so if anything sees gradients of activations. Collective."""
    found = collectives.all_gather_object([watch.hooks, watch.functions])
    hooks = [name for names, _ in found for name in names]
    if not hooks and not any(names for _, names in found):
        return False
    stepper = engine.stepper
    if type(stepper) is Stepper and engine.local_steps is None and engine.comm_hook is None:
        stepper.start_from_global_mean(weight_per_sample)
        return True
    if hooks:
        engine.log.warning(str(_scaled_activations(hooks[0])))
    return False


def _scaled_activations(hook: str) -> TrainError:
    return TrainError(
        "scaled-activations",
        f"The model has {hook}, which sees gradients of activations in another scale than in one process.",
        why="a pipeline, local steps, deterministic: everywhere and hooks on communication reduce gradients in their "
        "own way: those of activations are larger by the number of ranks or micro-batches",
        fix='use strategy="ddp" or fsdp without these settings, where such hooks see the gradients of one process, or '
        "make the hook linear in the gradient",
    )


def _compare_halves(engine: Engine, micro: MicroBatch, groups: int, state: Sequence[str] = ()) -> None:
    """Warn if a batch is sliced, and the loss depends on how. `state`: what the forward changes, which is named."""
    degrees = engine.mesh.degrees
    if engine.mesh.data_ranks * groups * degrees.pipeline == 1 and not engine.wrapped.slices:
        return
    trial, failed = _trial(engine, micro), None
    if degrees.pipeline == 1:
        own, counted, failed = kept_state.find(*trial)
        if groups > 1 and degrees.is_replicated:
            counted += kept_state.moved_parameters(*trial)
        forward_state.warn_of_buffers(own, counted, engine.warn, several=groups > 1)
        state = [*state, *own, *counted]
    checks = LaterChecks(engine, micro, groups, modes=(False,) if state else (False, True))
    checks.failed = failed
    checks.compare(micro)
    engine.stepper.check_later(checks)


class LaterChecks:
    """Compares the loss of a batch with its halves again, because masks may begin later, and a first micro-batch of one
    sample can't be halved: after steps 1, 2, 4 and 8, then in a small share of the time, and after the last step."""

    def __init__(self, engine: Engine, micro: MicroBatch, groups: int, modes: Sequence[bool]) -> None:
        """`modes`: of training, in which the loss is compared."""
        self.group, self._groups = groups - 1, groups  # the micro-batch of a step that is compared: each in its turn
        self.next = self._began = engine.position.step
        self._engine, self._before, self._modes, self._warned = engine, micro, modes, False
        self.failed: str | None = None  # of the checks before the first step: reported if that does not fail itself
        self._checked, self._since = self._began, perf_counter()

    def compare(self, micro: MicroBatch) -> None:
        """Collective. Warns once."""
        engine, other = self._engine, self._before
        step, began = engine.position.step, perf_counter()
        partner = None if other is micro else other
        replicated, trial = engine.mesh.degrees.is_replicated, _trial(engine, micro)
        found = loss_halves.compare(trial, replicated=replicated, partner=partner, modes=self._modes)
        said = collectives.all_gather_object(engine.module.proportions.said)
        found = found or next((text for text in said if text and not said[0]), None)  # rank 0 logs its own
        if found is not None:
            self._warned = True
            if step == self._began and loss_halves.is_failure(found):
                self.failed = self.failed or found
            else:
                engine.log.warning(found)
        now, steps = perf_counter(), step - self._began
        pause = _SHARE * (now - began) / max(now - self._since, 1e-9) * (step - self._checked)
        self.next = step + max(steps, 1, 0 if steps < _FIRST else collectives.broadcast_object(ceil(pause)))
        self._before = micro if micro.samples else other  # a placeholder has no sample to join
        self._checked, self._since = step, now

    def after(self, step: int, *, last: bool = False) -> None:
        """Call after a step on every rank."""
        micro = self._engine.stepper.checked
        if self.failed is not None:
            self._engine.log.warning(self.failed)
            self.failed = None
        if (step >= self.next or (last and step > self._checked)) and micro is not None and not self._warned:
            if micro is not self._before or step > self._began + 1:  # a captured step has one batch
                self.compare(micro)
            self.group = (self.group + 1) % self._groups
        self.next = max(self.next, step + 1)


def _name_draws(engine: Engine, micro: MicroBatch, say: Callable[[str], None]) -> None:
    def describe(micro: MicroBatch) -> str | None:
        return describe_draws(*_trial(engine, micro), pipelined=engine.mesh.degrees.pipeline > 1)

    say = engine.warn if engine.config.fixed_order else say
    if found := describe(micro):
        say(found)
    elif engine.draw.keys is not None and engine.graphed is None:
        engine.draw.watch = LateDraws(engine.draw, describe, say, engine.log)


def watch_own_draws(engine: Engine) -> None:
    """Of a custom loop whose losses the Trainer can't compute."""
    watches = engine.config.preflight and engine.draw.keys is not None and engine.world.size > 1
    if watches and not engine.checked and not engine.draw.watched:
        engine.draw.watched = True
        engine.draw.watch = LateDraws(engine.draw, lambda micro: None, engine.log.warning, engine.log)


def _trial(engine: Engine, micro: MicroBatch) -> loss_halves.Trial:
    """The arguments of checks that run the forward once more."""
    module, code = engine.module, [engine.task.criterion, engine.task.loss_fn]

    def run(batch: Any) -> Any:
        """With the graph that shows what a mean was divided by, and that a loss may need (a gradient penalty)."""
        # FSDP and pipelines would take a forward with gradients for one of training.
        if not engine.mesh.degrees.is_replicated or isinstance(module, PipelineLossModule):
            return module.recorded(partial(run_loss, module, batch))
        with torch.enable_grad():
            return run_loss(module, batch)

    return loss_halves.Trial(module, run, micro, engine.draw, code)


def _check_in_first_step(engine: Engine, micro: MicroBatch, groups: int) -> None:
    """One rank runs no trial: the first step itself shows the weight and the unused parameters."""
    config = engine.config
    engine.checked = True
    engine.module.zero_grad(set_to_none=True)
    engine.stepper.measure = partial(preflight.nominal, groups=groups)

    def check(*arguments: Any) -> None:
        hook.remove()
        _name_draws(engine, micro, engine.log.info)
        unused = preflight.without_gradient(engine.model)
        if unused and config.unused_parameters == "error":
            engine.log.warning(
                f"the loss does not depend on {', '.join(unused[:8])}; on several ranks this is an error"
            )

    hook = engine.optimizer.register_step_pre_hook(check)
    if groups > 1:
        watch, code = BackwardWatch(engine.model), [engine.task.criterion, engine.task.loss_fn]
        engine.stepper.weigh(several=True)
        engine.draw.samples = micro  # not begin(): what the first step draws is watched
        with nullcontext() if config.compile else watch:
            weight = preflight.warm_up(engine.model, engine.module, micro.batch, engine.draw, code)
        engine.draw.samples = None
        weight = weight.weight if isinstance(weight, Divisor) else micro.samples if weight is None else weight
        _start_from_global_mean(engine, watch, float(weight) * groups / micro.step_samples)
