"""Checks before the first step: does it mean the same on other ranks and with other micro-batches?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

from paceline.data.loader import Loader, MicroBatch
from paceline.errors import TrainError
from paceline.guard import forward_state, kept_state, loss_halves, preflight
from paceline.guard.gradient_hooks import BackwardWatch
from paceline.guard.random_draws import describe_draws
from paceline.models.divisor import Divisor
from paceline.parallel.replicas import Replicas
from paceline.runtime import collectives
from paceline.text import plural
from paceline.train import bucket_size, factory, standstill
from paceline.train.engine import Engine
from paceline.train.evaluate import run_loss
from paceline.train.local_replicas import replicas_differ
from paceline.train.pipeline_step import PipelineStepper
from paceline.train.recorder import Recorder
from paceline.train.step import Stepper


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
    _compare_halves(engine, micro, groups)
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


def _compare_halves(engine: Engine, micro: MicroBatch, groups: int) -> None:
    """Warn if a batch is sliced, and the loss depends on how."""
    degrees = engine.mesh.degrees
    if engine.mesh.data_ranks * groups * degrees.pipeline == 1 and not engine.wrapped.slices:
        return
    trial = _trial(engine, micro)
    if degrees.pipeline == 1:
        own, counted = kept_state.find(*trial)
        if groups > 1 and degrees.is_replicated:
            counted += kept_state.moved_parameters(*trial)
        forward_state.warn_of_buffers(own, counted, engine.warn, several=groups > 1)
    warning = loss_halves.compare(*trial, replicated=degrees.is_replicated)
    if warning is None and degrees.pipeline == 1:
        warning = loss_halves.compare(*trial, replicated=degrees.is_replicated, training=True)
    if warning is not None:
        engine.log.warning(f"loss: {warning}")


def _name_draws(engine: Engine, micro: MicroBatch, say: Callable[[str], None]) -> None:
    if found := describe_draws(*_trial(engine, micro), pipelined=engine.mesh.degrees.pipeline > 1):
        (engine.warn if engine.config.fixed_order else say)(found)


def _trial(engine: Engine, micro: MicroBatch) -> tuple[Any, ...]:
    """The arguments of checks that run the forward once more."""
    task = engine.task
    return engine.module, partial(run_loss, engine.module), micro, engine.draw, [task.criterion, task.loss_fn]


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
