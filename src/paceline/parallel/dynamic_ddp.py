"""DDP that follows `requires_grad`.

DDP reduces the parameters that required gradients when it was built. If layers are frozen or unfrozen later, it is
built again for the new set, on all ranks. A set that comes back (adversarial training alternates between two) keeps its
wrapper from then on; others are freed, because each holds buckets of the size of its gradients.

The weight of a step is reduced inside one of DDP's gradient buckets. If losses have weights that depend on the data,
ranks need their sum in every step. An all-reduce of its own costs a small model a tenth of its step. Instead, DDP is
given one more parameter, which nothing else knows: it is part of the step only while a wrapper is built. Its gradient
is passed to `torch.autograd.backward` beside that of the loss.

DDP averages in float32, so a weight is sent as digits of a fixed-point number, whose sums are recovered exactly by
rounding. The sum of token counts is exact, that of other weights has an error of 1e-11 relative to the nominal weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import frexp, isfinite, ldexp
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import TrainError
from paceline.log import Log
from paceline.parallel.data_parallel import CommHook, replicate
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.plan.network_model import Traffic
from paceline.runtime import collectives
from paceline.runtime.method_check import Departures
from paceline.text import listed, plural

_KEPT = 8
_SHOWN = 4
Flags = tuple[bool, ...]
Forward = Callable[[Any], Any]
_DIGITS = 4
_BITS = {torch.float32: 12, torch.float64: 24}  # of a digit: with the rounding of an average, below the mantissa
_MOST_RANKS = 24  # from here on, the rounding of averages over a number that is no power of two could reach one half
_MOST_POWER = 2048  # digits of so many ranks have a sum that float32 represents


class WeightInBucket:
    def __init__(self, dtype: torch.dtype, ranks: int) -> None:
        self.slot = nn.Parameter(torch.zeros(_DIGITS, dtype=dtype))
        self._ranks, self._bits = ranks, _BITS[dtype]
        self._unit = 0  # the exponent of the last digit

    @classmethod
    def for_buckets_of(cls, parameters: Iterable[Tensor], ranks: int) -> WeightInBucket | None:
        """None if no bucket can hold a weight. On a GPU, digits would cost more kernels than an all-reduce."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        most = _MOST_POWER if ranks & (ranks - 1) == 0 else _MOST_RANKS
        if ranks > most or any(parameter.device.type != "cpu" for parameter in trained):
            return None
        dtypes = {parameter.dtype for parameter in trained}
        found = [dtype for dtype in _BITS if dtype in dtypes]
        return cls(found[0], ranks) if found else None

    @contextmanager
    def attached(self, step: nn.Module) -> Iterator[None]:
        """Show the parameter to DDP, as the last one: indices of the others do not change."""
        holder = nn.Module()
        holder.slot = self.slot
        step.add_module("carried_weight", holder)
        try:
            yield
        finally:
            del step.carried_weight

    def gradient(self, weight: float, nominal: float) -> Tensor:
        """What the backward that is reduced gives to `slot`. `nominal`: a number near the sum, equal on every rank."""
        bits = self._bits
        # Three digits below the nominal weight, one above; of counts, no fraction is lost.
        self._unit = min(0, frexp(nominal)[1] - (_DIGITS - 1) * bits)
        self.slot.grad = None
        scaled = weight * 2.0**-self._unit
        if not abs(scaled) < 2.0 ** (_DIGITS * bits):
            return torch.full_like(self.slot, float("nan"), requires_grad=False)
        number, digits = round(scaled), []
        for _ in range(_DIGITS - 1):
            number, digit = divmod(number, 1 << bits)
            digits.append(float(digit * self._ranks))
        return torch.tensor([*digits, float(number * self._ranks)], dtype=self.slot.dtype)

    def total(self) -> float | None:
        """The sum over all ranks; None on every rank if the weight of one of them was not finite or out of range."""
        assert self.slot.grad is not None
        digits = self.slot.grad.tolist()
        if not all(map(isfinite, digits)):
            return None
        number = 0
        for digit in reversed(digits):
            number = (number << self._bits) + round(digit)
        return ldexp(number, self._unit)


def apply_ddp(parts: ModelParts, context: PassContext) -> None:
    config, hook = context.config, context.comm_hook
    allow_unused = config.unused_parameters == "allow"
    build = partial(replicate, parts.module, context.mesh.device, config.ddp, allow_unused=allow_unused, hook=hook)
    size = None if config.ddp.bucket_mb == "auto" else config.ddp.bucket_mb
    if size is None and config.sync is not None and config.sync.compress == "powersgd":
        # No small first bucket: its factors are sent in no time, but each bucket waits twice for the slowest rank.
        size = 25.0
    departures = Departures(config.timeout)
    replicas = DynamicDDP(parts.module, build, context.log, departures, size, hook, context.traffic)
    parts.forward, parts.no_sync = replicas, replicas.no_sync


class Build(Protocol):
    def __call__(self, *, again: bool, bucket_mb: float | None) -> DistributedDataParallel: ...


class DynamicDDP:
    """Calls the DDP wrapper of `step` for the parameters that currently require gradients."""

    def __init__(
        self,
        step: nn.Module,
        build: Build,
        log: Log,
        departures: Departures,
        bucket_mb: float | None = None,
        hook: CommHook | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """`hook`: what `build` registers on each wrapper. `traffic` counts what DDP sends besides gradients, which the
        hook counts."""
        self._build, self._log, self._step, self._bucket_mb, self.hook = build, log, step, bucket_mb, hook
        self.carried: WeightInBucket | None = None
        self.sends_weight = False  # the backward of the last forward reduces `carried` as well
        self._names = [name.removeprefix("model.") for name, _ in step.named_parameters()]
        self._parameters = list(step.parameters())
        self._departures = departures
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._ddp = build(again=False, bucket_mb=bucket_mb)
        self._built: Counter[Flags] = Counter([tuple(self._flags)])
        self._kept: dict[Flags, DistributedDataParallel] = {}
        self._sync, self._unreduced = True, False
        self._before: list[GradientMark] | None = None
        self._traffic = traffic
        # Called with a new wrapper and the next batch. A first backward makes DDP rebuild its buckets.
        self.warm_up: Callable[[Forward, Any], None] | None = None

    def __call__(self, batch: Any) -> Any:
        # 30 ns per parameter
        flags = [parameter.requires_grad for parameter in self._parameters]
        if flags != self._flags:
            self._switch(flags, batch)
        # Gradients of earlier micro-batches do not show whether this backward, which reduces them, reaches a parameter.
        accumulates = self._sync and self._unreduced
        self._before = marks_of(self._parameters) if accumulates else None
        ddp = self._ddp
        if ddp.require_backward_grad_sync is not self._sync:
            ddp.require_backward_grad_sync = self._sync
        self._unreduced = not self._sync
        self.sends_weight = self._sync and self.carried is not None
        if self._traffic is not None:
            self._count(self._traffic)
        return ddp(batch)

    def _count(self, traffic: Traffic) -> None:
        ddp, ranks = self._ddp, collectives.world()
        if ddp.will_sync_module_buffers():
            traffic.broadcast(sum(buffer.nbytes for buffer in ddp.modules_buffers), ranks, collectives.rank())
        if self._sync and ddp.find_unused_parameters:
            traffic.all_reduce(4 * len(ddp._module_parameters), ranks)  # which of them were used

    def carry_weight(self) -> bool:
        """Reduce the weight of each following step together with its gradients. Collective. Returns whether DDP was
        built again; it may be that nothing can carry the weight."""
        if self._ddp.find_unused_parameters or self._ddp.static_graph or self.hook is not None:
            return False  # they search the graph of the loss, which is without the weight; a hook may round the sum
        self.carried = WeightInBucket.for_buckets_of(self._parameters, collectives.world())
        if self.carried is not None:
            self._replace_all()
        return self.carried is not None

    def drop_weight(self) -> None:
        """Undo `carry_weight`. Collective."""
        self.carried = None
        self._replace_all()

    def resize(self, bucket_mb: float) -> None:
        """Build DDP again with buckets of this size. Collective."""
        self._bucket_mb = bucket_mb
        self._replace_all()

    def _replace_all(self) -> None:
        for wrapper in (self._ddp, *self._kept.values()):
            wrapper._remove_autograd_hooks()
        self._kept.clear()
        del self._ddp, wrapper  # frees its buckets
        self._rebuild()

    def _rebuild(self) -> None:
        with nullcontext() if self.carried is None else self.carried.attached(self._step):
            self._ddp = self._build(again=True, bucket_mb=self._bucket_mb)

    def trial(self, batch: Any) -> Any:
        """Like `__call__`, for a backward that starts from the loss only."""
        value, weight = self._ddp(batch)
        return self.with_slot(value), weight

    def with_slot(self, value: Tensor) -> Tensor:
        """The loss of a forward, for a backward that starts from it only."""
        self.sends_weight = False
        return value + self.carried.slot.sum() if self.carried is not None and value.requires_grad else value

    def without_gradient(self) -> list[str]:
        """The parameters that the backward of this rank did not reach, so that DDP has not completed its reduction."""
        if self._before is None:
            missing = [flag and p.grad is None for p, flag in zip(self._parameters, self._flags, strict=True)]
        else:
            parts = zip(self._parameters, self._flags, self._before, strict=True)
            missing = [flag and (p.grad is None or old.holds_for(p.grad)) for p, flag, old in parts]
        return [name for name, is_missing in zip(self._names, missing, strict=True) if is_missing]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Not DDP's own context: the forward inside may switch to another wrapper."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def _switch(self, flags: list[bool], batch: Any) -> None:
        changed = [number for number, flag in enumerate(flags) if flag != self._flags[number]]
        self._require_reduced(changed)
        self._require_same_flags(flags, changed)
        before, after = tuple(self._flags), tuple(flags)
        if self._built[before] > 1 and len(self._kept) < _KEPT:
            self._kept[before] = self._ddp
        else:
            self._ddp._remove_autograd_hooks()
        self._flags = flags
        kept = self._kept.get(after)
        if kept is not None:
            self._ddp = kept
            return
        self._built[after] += 1
        trained = [self._names[number] for number in changed if flags[number]]
        frozen = [self._names[number] for number in changed if not flags[number]]
        parts = [f"{listed(names)} {verb}" for names, verb in ((trained, "unfrozen"), (frozen, "frozen")) if names]
        self._log.info(f"ddp: rebuilt, because requires_grad changed: {'; '.join(parts)}")
        self._rebuild()
        if self.warm_up is not None:
            with self.without_hook():
                self.warm_up(self.trial, batch)

    def without_hook(self) -> AbstractContextManager[None]:
        """For backwards that are not part of a training step."""
        return nullcontext() if self.hook is None else self.hook.suspended()

    def _require_reduced(self, changed: list[int]) -> None:
        if self._unreduced and any(parameter.grad is not None for parameter in self._parameters):
            raise TrainError(
                "requires-grad-in-step",
                f"requires_grad of {listed([self._names[number] for number in changed])} changed between "
                "micro-batches of one step.",
            )

    def _require_same_flags(self, flags: list[bool], changed: list[int]) -> None:
        agreed = self._departures.joined_by(repr(flags))
        if agreed < collectives.world():
            states = ", ".join(f"{self._names[number]} to {flags[number]}" for number in changed[:_SHOWN])
            raise TrainError(
                "requires-grad-differs",
                f"This rank changed requires_grad of {plural(len(changed), 'parameter')} ({states}); "
                f"{agreed} of {collectives.world()} ranks made the same change.",
                why="DDP reduces the parameters that require gradients, which must be the same on every rank",
            )


class GradientMark(NamedTuple):
    """A gradient and its version. By a weak reference, because the id of a gradient may be that of an earlier one."""

    gradient: ref[Tensor] | None
    version: int

    def holds_for(self, gradient: Tensor | None) -> bool:
        """Whether this is still the gradient, unchanged."""
        if gradient is None or self.gradient is None:
            return gradient is None and self.gradient is None
        return self.gradient() is gradient and gradient._version == self.version


def marks_of(parameters: Iterable[Tensor]) -> list[GradientMark]:
    gradients = [parameter.grad for parameter in parameters]
    return [GradientMark(None, 0) if each is None else GradientMark(ref(each), each._version) for each in gradients]
