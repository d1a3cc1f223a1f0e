"""Checks before the first step, and some later: does it mean the same on other ranks and with other micro-batches?

`ddp: {bucket_mb: auto}` chooses the size of DDP's buckets by a short measurement. A bucket is reduced while the
backward still computes the gradients of the next one. Small buckets start early, but each of them costs the latency of
a collective; which size is best depends on the model, the network and the device. So after the pre-flight, DDP is built
with a few sizes, each runs the first micro-batch with weight zero a few times, in turns, and the one whose slowest rank
was fastest is used. Rank 0 decides. The choice is saved in checkpoints: a resumed run adds gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from math import ceil, inf, log
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from paceline.data.loader import Loader, MicroBatch
from paceline.errors import TrainError
from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.runtime import collectives
from paceline.text import plural
from paceline.train import recipe_objects, standstill
from paceline.train.checks import forward_changes, preflight, snapshot, split_invariance
from paceline.train.checks.random_draws import LateDraws, describe_draws
from paceline.train.engine import Engine
from paceline.train.evaluate import run_loss
from paceline.train.features.gradient_hooks import BackwardInspector
from paceline.train.features.local_steps import replicas_differ
from paceline.train.recorder import Recorder
from paceline.train.train_step import TrainStep

_FIRST, _SHARE = 8, 200  # steps after which a later check takes at most this part of the time
SIZES = (1.0, 5.0, 25.0, 100.0)  # MB, as DDP counts them: 2²⁰ bytes
_DEFAULT = 25.0
_ROUNDS = 5
_SECONDS = 10.0  # no further round is begun after this time
_MARGIN = 1.02  # between sizes whose times differ by less, the one nearest to the default is used


def choose(engine: Engine, micro: MicroBatch) -> None:
    """Measure sizes and use one, if the recipe says `auto`. Call within `engine.draw`. Collective."""
    if engine.config.ddp.bucket_mb != "auto":
        return
    replicas = engine.parts.forward
    if not isinstance(replicas, DynamicDDP):
        engine.log.info("ddp: bucket_mb: auto has no effect, because this layout does not use DDP")
        return
    sizes = candidates(list(engine.parts.module.parameters()))
    if len(sizes) == 1:
        choice, reason = _DEFAULT, "all gradients fit in one bucket"
    else:
        seconds = _measure(engine, replicas, micro, sizes)
        choice = collectives.broadcast_object(select(seconds))
        reason = ", ".join(f"{size:g} MB {1000 * each:.3g} ms" for size, each in seconds.items())
    _use(engine, replicas, choice)
    with replicas.without_hook():
        _warm_up(engine, replicas, micro)
    engine.log.info(f"ddp: bucket_mb: auto selected {choice:g} MB ({reason})")


def _warm_up(engine: Engine, replicas: DynamicDDP, micro: MicroBatch) -> None:
    engine.draw.begin(micro)
    preflight.warm_up(engine.parts.model, replicas.trial, micro.batch, engine.draw, _user_code(engine))
    engine.draw.end()


def candidates(parameters: Sequence[Tensor]) -> list[float]:
    """The sizes that divide the gradients into different numbers of buckets."""
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    sizes: dict[int, float] = {}
    for size in SIZES:
        buckets, _ = _compute_bucket_assignment_by_size(trained, [int(size * 2**20)])
        sizes.setdefault(len(buckets), size)
    return list(sizes.values())


def select(seconds: Mapping[float, float]) -> float:
    fast = [size for size, each in seconds.items() if each <= min(seconds.values()) * _MARGIN]
    return min(fast, key=lambda size: abs(log(size / _DEFAULT)))


def _measure(engine: Engine, replicas: DynamicDDP, micro: MicroBatch, sizes: Sequence[float]) -> dict[float, float]:
    """Seconds of a forward and backward by size: the median of the slowest rank."""
    seconds: dict[float, list[float]] = {size: [] for size in sizes}
    began = perf_counter()
    engine.draw.begin(micro)
    with snapshot.preserved(engine.parts.model, *_user_code(engine)), replicas.without_hook():
        for _ in range(_ROUNDS):
            for size in sizes:
                engine.parts.module.zero_grad(set_to_none=True)  # views of the buckets of the last size
                replicas.resize(size)
                _seconds(engine, replicas, micro)  # after the first backward, DDP rebuilds its buckets
                seconds[size].append(_seconds(engine, replicas, micro))
            if not collectives.broadcast_object(perf_counter() - began < _SECONDS):
                break
    engine.draw.end()
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64, device=engine.world.device)
    collectives.all_reduce(slowest, op="max")
    return {size: median(times) for size, times in zip(sizes, slowest.tolist(), strict=True)}


def _seconds(engine: Engine, replicas: DynamicDDP, micro: MicroBatch) -> float:
    batch, device = snapshot.copied(micro.batch), engine.world.device
    collectives.barrier()
    began = _now(device)
    with engine.draw.copy():
        value, _ = replicas.trial(batch)
        (value * 0.0).backward()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def _use(engine: Engine, replicas: DynamicDDP, size: float) -> None:
    replicas.resize(size)
    ddp = engine.config.ddp.model_copy(update={"bucket_mb": size})
    engine.config = engine.config.model_copy(update={"ddp": ddp})


def _user_code(engine: Engine) -> list[Any]:
    return [engine.user.criterion, engine.user.loss_fn]


class BucketSizeState:
    """The choice, in checkpoints of a run with `bucket_mb: auto`. A run that has measured keeps its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> float | None:
        size = self._engine.config.ddp.bucket_mb
        return size if isinstance(size, float) else None

    def load_state_dict(self, state: float | None) -> None:
        engine, replicas = self._engine, self._engine.parts.forward
        if state is not None and engine.config.ddp.bucket_mb == "auto" and isinstance(replicas, DynamicDDP):
            _use(engine, replicas, state)
            engine.log.info(f"ddp: bucket_mb: auto uses {state:g} MB, as measured before this checkpoint")


def checked_micros(
    engine: Engine, loader: Loader, recorder: Recorder, groups: int, epochs: int | None
) -> Iterator[MicroBatch]:
    """The remaining micro-batches, after the checks with the first of them."""
    micros = loader.micros(engine.position.step, epochs)
    if groups * engine.mesh.data_ranks > 1:
        micros = map(MicroBatch.with_floors, micros)  # before they leave the CPU
    micros = engine.telemetry.record_suspects(engine.ready(micros))
    first = next(micros, None)
    if first is None:
        return micros
    check(engine, first, groups, loader.fingerprint)
    recorder.tokens_per_sample = recipe_objects.tokens_per_sample(first.batch)
    recorder.begin(loader.input, groups)
    return chain([first], micros)


def check(engine: Engine, micro: MicroBatch, groups: int, fingerprint: Callable[[], Any]) -> None:
    """Run the pre-flight, once, before the first step. Must be called within `engine.draw`."""
    config, stepper = engine.config, engine.stepper
    if engine.parts.checked or not config.preflight:
        return
    for begin in engine.hooks.begin:
        begin(groups)
    if engine.world.size == 1:
        choose(engine, micro)
        _check_in_first_step(engine, micro, groups)
        _compare_halves(engine, micro, groups, (), keeps=True, is_random=False)
        return
    stepper.weigh(several=groups > 1)
    replicas, watch = engine.parts.forward, BackwardInspector(engine.parts.model)
    # Before the trial, which builds buckets: few losses turn out to have a weight that does not depend on the data.
    carries = isinstance(replicas, DynamicDDP) and type(stepper) is TrainStep and replicas.carry_weight()
    with (
        replicas.without_hook() if isinstance(replicas, DynamicDDP) else nullcontext(),
        nullcontext() if config.compile else watch,  # a mode would be compiled into the graph
    ):
        weight, depends, (own, counted), keeps = preflight.check(
            _trial(engine, micro),
            engine.parts,
            engine.mesh,
            fingerprint=fingerprint(),
            allow_unused=config.unused_parameters == "allow",
            compiled=bool(config.compile),
            same_weights=not replicas_differ(engine.features.local_steps),
            run_zero_weight=stepper.run_zero_weight,
        )
    engine.parts.checked = True
    per_sample = preflight.power_of_two(weight * groups / micro.step_samples)
    stepper.weights.expect(preflight.nominal(weight, groups), per_sample)
    if _start_from_global_mean(engine, watch, weight * groups / micro.step_samples):
        depends = False  # the weight of a step is reduced before its backward
    if carries and isinstance(replicas, DynamicDDP) and not depends:
        replicas.drop_weight()
        _warm_up(engine, replicas, micro)
    choose(engine, micro)
    is_random = _name_draws(engine, micro, engine.log.warning)
    _compare_halves(engine, micro, groups, [*own, *counted], keeps=keeps, is_random=is_random)
    several = groups > 1 or engine.mesh.degrees.pipeline > 1 or config.fixed_order
    forward_changes.warn_of_buffers(own, counted, engine.warn, several=several)
    standstill.shorten_timeout(config.timeout)  # compilation is done
    if engine.features.reduction.traffic is not None:
        engine.features.reduction.traffic.take()  # only bytes of steps are recorded
    engine.log.info(f"pre-flight passed on {plural(engine.world.size, 'rank')}")


def _start_from_global_mean(engine: Engine, watch: BackwardInspector, weight_per_sample: float) -> bool:
    """Do so if anything sees gradients of activations. Collective."""
    found = collectives.all_gather_object([watch.hooks, watch.functions])
    hooks = [name for names, _ in found for name in names]
    if not hooks and not any(names for _, names in found):
        return False
    stepper = engine.stepper
    if type(stepper) is TrainStep and engine.mesh.local_replicas == 1 and engine.features.reduction.hook is None:
        stepper.weights.start_from_global_mean(weight_per_sample)
        return True
    if hooks:
        error = TrainError(
            "scaled-activations",
            f"The model has {hooks[0]}, which sees gradients of activations in another scale than in one process.",
            why="a pipeline, local steps, deterministic: everywhere and hooks on communication reduce gradients in "
            "their own way: those of activations are larger by the number of ranks or micro-batches",
            fix='use strategy="ddp" or fsdp without these settings, where such hooks see the gradients of one process, '
            "or make the hook linear in the gradient",
        )
        engine.log.warning(str(error))
    return False


def _compare_halves(
    engine: Engine, micro: MicroBatch, groups: int, state: Sequence[str], *, keeps: bool, is_random: bool
) -> None:
    """Warn if a batch is sliced, and the loss depends on how. `state`: what the forward changes, which is named;
    `keeps`: whether it may change attributes; `is_random`: whether losses can't be compared in training mode."""
    degrees = engine.mesh.degrees
    if engine.mesh.data_ranks * groups * degrees.pipeline == 1 and not engine.parts.slices:
        return
    trial, failed = _trial(engine, micro), None
    if degrees.pipeline == 1:
        own, counted, failed = forward_changes.find(trial) if keeps else ([], [], None)
        if groups > 1 and degrees.is_replicated:
            counted += forward_changes.moved_parameters(trial)
        forward_changes.warn_of_buffers(own, counted, engine.warn, several=groups > 1)
        state = [*state, *own, *counted]
    checks = LaterChecks(engine, micro, groups, keeps_state=bool(state))
    checks.failed = failed
    checks.compare(micro, is_random=is_random)
    engine.stepper.check_later(checks)


class LaterChecks:
    """Compares the loss of a batch with its halves again, because masks may begin later, and a first micro-batch of one
    sample can't be halved: after steps 1, 2, 4 and 8, then in a small share of the time, and after the last step.

    A micro-batch with values that none had before is compared by the next of these, else one at random: taken in turn,
    those with masks may never be met, because epochs repeat as well."""

    def __init__(self, engine: Engine, micro: MicroBatch, groups: int, *, keeps_state: bool) -> None:
        self._groups, self._group = groups, groups - 1  # the micro-batch of a step that is kept
        self._kept: MicroBatch | None = None
        self._new: MicroBatch | None = None
        self._floors = dict(micro.with_floors().floors or {})
        self.next = self._began = engine.position.step
        self._engine, self._before, self._warned = engine, micro, False
        self._how = {"replicated": engine.mesh.degrees.is_replicated, "several": groups > 1}
        self._training = not keeps_state  # whether to compare in training mode
        self.failed: str | None = None  # of a check: reported if the next step does not fail itself
        self._checked, self._since = self._began, perf_counter()

    def keep(self, micro: MicroBatch) -> None:
        """Call with every micro-batch of training."""
        if micro.group == self._group:
            self._kept = micro
        looks = self._new is None and micro.samples and not self._warned and self._engine.hooks.captured is None
        found = (micro.with_floors().floors if looks else None) or {}  # a captured step must not read values
        if any(floor < self._floors.get(number, inf) for number, floor in found.items()):
            self._new = micro
            self._floors |= {number: min(floor, self._floors.get(number, inf)) for number, floor in found.items()}

    def compare(self, micro: MicroBatch, *, is_random: bool = False) -> None:
        """Collective. Warns once."""
        engine, other = self._engine, self._before
        step, began = engine.position.step, perf_counter()
        partner = None if other is micro else other
        training = self._training and not is_random
        found = split_invariance.compare(_trial(engine, micro), partner=partner, training=training, **self._how)
        said = collectives.all_gather_object(engine.parts.module.proportions.said)
        found = found or next((text for text in said if text and not said[0]), None)  # rank 0 logs its own
        if found is not None:
            self._warned = True
            if split_invariance.is_failure(found):
                self.failed = self.failed or found
            else:
                is_fact = found in (split_invariance.GATHERS, split_invariance.NEEDS_GRAPH)
                (engine.log.info if is_fact else engine.log.warning)(found)
        now, steps = perf_counter(), step - self._began
        pause = _SHARE * (now - began) / max(now - self._since, 1e-9) * (step - self._checked)
        self.next = step + max(steps, 1, 0 if steps < _FIRST else collectives.broadcast_object(ceil(pause)))
        if micro.samples:  # a placeholder has no sample to join
            self._before = split_invariance.joined(micro, partner) if partner and micro.samples == 1 else micro
        self._checked, self._since = step, now

    def after(self, step: int, *, last: bool = False) -> None:
        """Call after a step on every rank."""
        self._report_failed()
        if (step >= self.next or (last and step > self._checked)) and self._kept is not None and not self._warned:
            if self._groups > 1 or step > self._began + 1:  # else the first micro-batch once more
                # The stages of a pipeline have one micro-batch.
                self.compare(self._new if self._new and self._engine.mesh.degrees.pipeline == 1 else self._kept)
                self._new = None
            self._group = Random(step).randrange(self._groups)  # equal on every rank
        if last:
            self._report_failed()
        self.next = max(self.next, step + 1)

    def _report_failed(self) -> None:
        if self.failed is not None:
            self._engine.log.warning(self.failed)
            self.failed = None


def _name_draws(engine: Engine, micro: MicroBatch, say: Callable[[str], None]) -> bool:
    """Returns whether the loss is random on every rank."""

    def describe(micro: MicroBatch) -> tuple[str | None, bool]:
        return describe_draws(_trial(engine, micro), pipelined=engine.mesh.degrees.pipeline > 1)

    say = engine.warn if engine.config.fixed_order else say
    found, is_random = describe(micro)
    if found:
        say(found)
    elif engine.draw.keys is not None and engine.hooks.captured is None:
        engine.draw.watch = LateDraws(engine.draw, describe, say, engine.log)
    return is_random


def watch_own_draws(engine: Engine) -> None:
    """Of a custom loop whose losses the Trainer can't compute."""
    watches = engine.config.preflight and engine.draw.keys is not None and engine.world.size > 1
    if watches and not engine.parts.checked and not engine.draw.watched:
        engine.draw.watched = True
        engine.draw.watch = LateDraws(engine.draw, lambda micro: (None, False), engine.log.warning, engine.log)


def _trial(engine: Engine, micro: MicroBatch) -> split_invariance.LossTrial:
    """The arguments of checks that run the forward once more."""

    def run(batch: Any) -> Any:
        """With the graph that shows what a mean was divided by, and that a loss may need (a gradient penalty)."""
        # FSDP and pipelines would take a forward with gradients for one of training.
        if not engine.mesh.degrees.is_replicated:
            return engine.parts.module.recorded(partial(run_loss, engine.parts.module, batch))
        with torch.enable_grad():
            return run_loss(engine.parts.module, batch)

    return split_invariance.LossTrial(engine.parts.module, run, micro, engine.draw, _user_code(engine))


def _check_in_first_step(engine: Engine, micro: MicroBatch, groups: int) -> None:
    """One rank runs no trial: the first step itself shows the weight and the unused parameters."""
    config, parts = engine.config, engine.parts
    parts.checked = True
    parts.module.zero_grad(set_to_none=True)
    engine.stepper.weights.measure_first(partial(preflight.nominal, groups=groups))
    before = forward_changes.attributes(parts.model, parts.module.loss_state)

    def check(*arguments: Any) -> None:
        hook.remove()
        changed = groups == 1 and forward_changes.attributes(parts.model, parts.module.loss_state) != before
        if changed and (failed := forward_changes.find(_trial(engine, micro))[2]):
            engine.log.warning(failed)
        _name_draws(engine, micro, engine.log.info)
        unused = preflight.without_gradient(engine.parts.model)
        if unused and config.unused_parameters == "error":
            engine.log.warning(
                f"the loss does not depend on {', '.join(unused[:8])}; on several ranks this is an error"
            )

    hook = engine.bound.optimizer.register_step_pre_hook(check)
    if groups > 1:
        watch = BackwardInspector(engine.parts.model)
        engine.stepper.weigh(several=True)
        engine.draw.samples = micro  # not begin(): what the first step draws is watched
        with nullcontext() if config.compile else watch:
            weight = preflight.warm_up(parts.model, parts.module, micro.batch, engine.draw, _user_code(engine))
        engine.draw.samples = None
        _start_from_global_mean(engine, watch, preflight.read_weight(weight, micro)[1] * groups / micro.step_samples)
