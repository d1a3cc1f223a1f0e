"""Steps as CUDA graphs, for `graph: true`: forward, backward and update of a step start at once, without Python.

The first steps run eagerly, as a warm-up. Then one is captured, which runs nothing, and replayed from there on. What
differs between steps is in memory that the graph reads and the host fills before each replay: inputs, learning rates,
keys of dropout masks and `paceline.noise`, and what features send in `before_update`, as the weight of the moving
average. torch registers its own generator.

Steps whose batches have another shape run eagerly with the same parameters and state, such as the last one of an epoch;
shapes that come back are captured as well. Both give the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.data.batches import apply, tensors_in
from paceline.data.loader import MicroBatch
from paceline.errors import TrainError
from paceline.log import Log
from paceline.models.graph_constants import Constants, changed, constants_of, settings_of, shape_of
from paceline.models.loss_module import LossModule
from paceline.models.losses import Loss
from paceline.run.heartbeat import counters
from paceline.runtime.noise import Draw
from paceline.train import cuda_graphs
from paceline.train.cuda_graphs import raise_if_waiting, require_capturable
from paceline.train.features.context import FeatureContext
from paceline.train.features.schedule import LearningRate
from paceline.train.optimizer_update import OptimizerUpdate
from paceline.train.train_step import TrainStep

WARM_UP = 3  # eager steps with batches of a shape before it is captured
_GRAPHS = 4  # shapes that are captured; each takes the memory of its inputs, and seconds for a large model
_RATES = 8  # captures for another learning rate before it is read from the device
_EAGER = 50  # eager steps before a warning, if they are the majority


class _Position(int):
    """Of a result in the values of a graph."""


@dataclass
class _Captured:
    """A graph, what it reads, and the results that each replay overwrites."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    keys: Tensor | None
    noise: list[Draw]
    rates: list[float]  # that were captured as constants
    values: Tensor
    losses: list[tuple[Any, Any]]  # positions, and numbers that do not change
    metrics: list[tuple[Mapping[str, Any], Any]]
    norm: _Position | None
    skipped: Any
    means: bool
    data_weighted: bool


def graphed_step(context: FeatureContext, step: TrainStep, updater: OptimizerUpdate) -> GraphedStep:
    config, callbacks = context.config, context.user.callbacks
    waits = config.nonfinite != "raise" or context.bound.scaler.is_enabled()
    parts = (context.parts.module, step, updater, context.schedule, context.log)
    return GraphedStep(*parts, waits=waits, has_callback=bool(callbacks.hooks["on_gradients"]))


class GraphedStep:
    """Collects the micro-batches of a step, and replays the graph for their shapes if there is one."""

    def __init__(
        self,
        module: LossModule,
        step: TrainStep,
        updater: OptimizerUpdate,
        schedule: LearningRate,
        log: Log,
        *,
        waits: bool,
        has_callback: bool,
    ) -> None:
        """`waits`: for values, if the optimizer is not fused. `has_callback`: a callback has `on_gradients`."""
        self._module, self._stepper, self._updater, self._draw, self._log = module, step, updater, step.draw, log
        self._schedule, self._waits, self._has_callback = schedule, waits, has_callback
        self._device = next(module.parameters()).device
        require_capturable(updater.optimizer, waits=waits)
        self._graphs = cuda_graphs.CudaGraphs(self._device)
        self._groups = updater.optimizer.param_groups
        self._user_code_ran = False  # it may have changed what was captured
        self._warned = False
        self._forget()

    def __enter__(self) -> None:
        """At the beginning of `train()`."""
        if self._has_callback:
            raise _callback_error()
        require_capturable(self._updater.optimizer, waits=self._waits)
        self._rates_on_device = self._schedule.changes

    def __exit__(self, *exc: object) -> None:
        """Free the graphs and their memory."""
        self._forget()

    def _forget(self) -> None:
        self._micros: list[MicroBatch] = []
        self._captured: dict[Hashable, _Captured] = {}
        self._graphs.release()
        self._seen: Counter[Hashable] = Counter()
        self._steps = self._rate_changes = 0
        self._eager: Counter[str] = Counter()  # steps, by cause
        self._rates_on_device = False
        self._rates: Tensor | None = None  # in float64
        self._sent: list[float] = []
        self._stamp: Constants = {}
        self._settings: Constants = {}  # of the optimizer, in the last step
        self._changed: list[str] = []  # names of constants that did, the last time
        self._other = ""  # a type in batches whose values can't be compared
        self._noise: dict[Hashable, dict[tuple[int, int], Draw]] = {}  # of the last warm-up, by shape

    def after_user_code(self) -> None:
        self._user_code_ran = True

    def add(self, micro: MicroBatch) -> None:
        self._micros.append(micro)

    def take(self) -> Tensor | None:
        """Run the collected micro-batches and update the parameters. Returns the gradient norm, if it was computed."""
        micros, self._micros = self._micros, []
        self._updater.prepare(micros[-1].step)
        inputs: list[Tensor] = []
        others: list[str] = []
        parts = [(each.samples, each.step_samples, each.exact, shape_of(each.batch, inputs, others)) for each in micros]
        shape: Hashable = tuple(parts)
        if others:  # such steps are never captured
            shape, self._other = None, others[0]
        captured = self._find(shape, micros)
        self._send_rates()
        norm = self._run_eagerly(shape, micros) if captured is None else self._replay(captured, micros, inputs)
        self._updater.finish(micros[-1].step)
        return norm

    def _find(self, shape: Hashable, micros: list[MicroBatch]) -> _Captured | None:
        """The graph for micro-batches of this shape; None: run them eagerly."""
        self._steps += 1
        if self._user_code_ran or self._schedule.steps_scheduler:
            self._drop_outdated()
        found = self._captured.get(shape)
        if found is not None and found.rates != self._constant_rates():
            found = None
            self._release()
            self._rate_changes += 1
            self._rates_on_device |= self._rate_changes > _RATES
        if found is None and shape in self._noise and len(self._captured) < _GRAPHS:
            found = self._captured[shape] = self._capture(shape, micros)
        return found

    def _release(self) -> None:
        self._captured = {}
        self._graphs.release()

    def _constant_rates(self) -> list[float]:
        return [] if self._rates_on_device else [group["lr"] for group in self._groups]

    def _constants(self) -> Constants:
        call = self._module.call
        assert call is not None
        loss = call.loss if call.criterion is None else call.criterion
        return constants_of(self._module.model, loss, self._updater.optimizer)

    def _drop_outdated(self) -> None:
        """User code may have changed what a graph has as a constant, or replaced tensors that it reads. Schedulers
        change settings of the optimizer."""
        optimizer = self._updater.optimizer
        self._groups = optimizer.param_groups
        settings = settings_of(optimizer)
        names = changed(self._settings or settings, settings)
        if not names and self._user_code_ran and self._captured:
            names = changed(self._stamp, self._constants())
        self._settings, self._user_code_ran = settings, False
        if names:
            self._release()
            self._noise, self._seen = {}, Counter()  # an optimizer creates its state in a step that is not captured
            self._changed = names

    def _send_rates(self) -> None:
        """Copy the learning rates to the device, if they changed."""
        rates = [group["lr"] for group in self._groups] if self._rates_on_device else []
        if rates != self._sent:
            self._sent = rates
            host = torch.tensor(rates, dtype=torch.float64)
            if self._rates is None or len(self._rates) != len(rates):
                self._rates = torch.empty_like(host, device=self._device)
            self._rates.copy_(host, non_blocking=True)

    def _run_eagerly(self, shape: Hashable, micros: list[MicroBatch]) -> Tensor | None:
        self._seen[shape] += 1
        if shape is None:
            self._count_eager("others")
        elif self._seen[shape] > WARM_UP or len(self._seen) > _GRAPHS:
            self._count_eager("shapes")
        elif self._changed:
            self._count_eager("changes")
        strict = shape is not None and self._seen[shape] >= WARM_UP and len(self._captured) < _GRAPHS
        noise = self._noise.setdefault(shape, {}) if strict else None
        with self._graphs.warm_up(strict=strict), self._reading(noise):
            try:
                norm = self._step(micros)
            except RuntimeError as error:
                if strict:
                    raise_if_waiting(error, self._module.model, partial(self._add_all, micros))
                raise
        if self._captured:
            self._stamp = self._constants()  # the code of the step may count
        return norm

    def _count_eager(self, cause: str) -> None:
        self._eager[cause] += 1
        count = self._eager.total()
        if count >= _EAGER and 2 * count > self._steps and not self._warned:
            self._warned = True
            cycles = not {"betas", "momentum"}.isdisjoint(self._changed)
            because = {
                "shapes": f"batches have many shapes ({len(self._seen)} so far, at most {_GRAPHS} are captured). Pad "
                "samples to a few lengths, drop the last batch of an epoch, and keep text and numbers that differ out "
                "of batches",
                "others": f"batches contain {self._other}, which may differ between steps. Use tensors instead, or "
                "leave it out",
                "changes": f"{', '.join(self._changed[:3])} changed again and again, but a graph has constants. "
                + ("Create OneCycleLR or CyclicLR with cycle_momentum=False" if cycles else "Change it less often"),
            }[self._eager.most_common(1)[0][0]]
            self._log.warning(f"graph: {count} of {self._steps} steps ran eagerly, because {because}")

    def _capture(self, shape: Hashable, micros: list[MicroBatch]) -> _Captured:
        fixed = [replace(micro, batch=apply(micro.batch, torch.clone)) for micro in micros]
        keys = self._draw.keys
        rows: Tensor | None = None
        if keys is not None and keys.used is not False:  # None: compiled code does not tell
            rows = keys.of_step(micros[-1].step, sum(micro.samples for micro in micros)).to(self._device)
        noise = self._noise[shape]

        def run() -> tuple[tuple[Any, Any, Any, Any], Tensor]:
            norm, weights, found = self._step(fixed), self._stepper.weights, []

            def position(value: Tensor) -> Any:
                found.append(value.detach().reshape(()))
                return _Position(len(found) - 1)

            results = apply((weights.losses, weights.metrics, norm, self._updater.skipped), position)
            if len({value.dtype for value in found}) > 1:
                found = [value.to(torch.float64) for value in found]
            return results, torch.stack(found) if len(found) > 1 else found[0]

        self._send_rates()
        with self._reading(noise, rows, capturing=True):
            try:
                replay, (results, values) = self._graphs.capture(run)
            except RuntimeError as error:
                again = partial(self._graphs.capture, partial(self._add_all, fixed))
                raise_if_waiting(error, self._module.model, again)
                raise
        weights = self._stepper.weights
        kind = weights.means, weights.data_weighted
        self._stepper.reset()
        self._stamp = self._constants()
        inputs = [tensor for micro in fixed for tensor in tensors_in(micro.batch)]
        read = inputs, rows, list(noise.values()), self._constant_rates()
        return _Captured(replay, *read, values, *results, *kind)

    def _replay(self, captured: _Captured, micros: list[MicroBatch], inputs: list[Tensor]) -> Tensor | None:
        torch._foreach_copy_(captured.inputs, inputs)
        if captured.keys is not None:
            assert self._draw.keys is not None
            captured.keys.copy_(self._draw.keys.of_step(micros[-1].step, len(captured.keys)), non_blocking=True)
        for draw in captured.noise:
            draw.fill(self._draw.seed_of(micros[-1].step, draw.number))
        counters.micros += len(micros)
        values: list[Tensor] = []

        def run() -> Any:
            captured.replay()
            copied = captured.values.clone()  # the next replay overwrites them
            values.extend(copied.unbind() if copied.dim() else (copied,))
            return _value(values, captured.skipped)

        self._updater.replay(run)
        weights = self._stepper.weights
        weights.losses = [(values[loss], _value(values, weight)) for loss, weight in captured.losses]
        weights.means, weights.data_weighted = captured.means, captured.data_weighted
        for named, weight in captured.metrics:
            own = {name: _value(values, value) for name, value in named.items()}
            weights.metrics.append((own, _value(values, weight)))
        return None if captured.norm is None else values[captured.norm]

    def _step(self, micros: Sequence[MicroBatch]) -> Tensor | None:
        """What is captured, or runs eagerly."""
        weights = self._stepper.weights
        self._add_all(micros)
        for hook in self._stepper.hooks.on_losses:
            hook(weights.losses)
        with ExitStack() as kept:
            if self._rates_on_device and self._rates is not None:
                rates = self._rates.float().unbind()  # fused kernels read float32
                for group, rate in zip(self._groups, rates, strict=True):
                    _set(kept, group, lr=rate)
            factor = weights.factor() if weights.data_weighted else weights.constant_factor
            return self._updater.apply(micros[-1].step, factor, prepared=True)

    def _add_all(self, micros: Sequence[MicroBatch]) -> None:
        for micro in micros:
            self._stepper.add(micro)

    @contextmanager
    def _reading(
        self, noise: dict[tuple[int, int], Draw] | None, rows: Tensor | None = None, *, capturing: bool = False
    ) -> Iterator[None]:
        """What differs between steps comes from memory on the device."""
        keys, proportions = self._draw.keys, self._module.proportions
        with ExitStack() as kept:
            kept.callback(setattr, self._draw, "captured", None)
            self._draw.captured = noise
            if keys is not None and rows is not None:
                kept.enter_context(keys.reading(rows))
            if capturing:
                kept.enter_context(proportions.unheard())  # it would read a value
                for group in self._groups:
                    if "capturable" in group:  # torch asks for it, although fused kernels need no change
                        _set(kept, group, capturable=True)
            yield


def _value(values: Sequence[Tensor], kept: Any) -> Any:
    if type(kept) is Loss:
        return Loss(_value(values, kept.sum), _value(values, kept.weight))
    return values[kept] if type(kept) is _Position else kept


def _set(kept: ExitStack, owner: dict[str, Any], **values: Any) -> None:
    """Set values until `kept` ends."""
    kept.callback(owner.update, {name: owner[name] for name in values})
    owner.update(values)


def _callback_error() -> TrainError:
    return TrainError("graph-and-callback", "A callback has on_gradients, which graph: true can't call.")
