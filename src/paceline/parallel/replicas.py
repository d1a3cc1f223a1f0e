"""DDP that follows `requires_grad`.

DDP reduces the parameters that required gradients when it was built. If layers are frozen or unfrozen later, it is
built again for the new set, on all ranks. A set that comes back (adversarial training alternates between two) keeps its
wrapper from then on; others are freed, because each holds buckets of the size of its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import TrainError
from paceline.log import Log
from paceline.parallel.agreement import Agreement
from paceline.runtime import collectives
from paceline.text import plural

_KEPT = 8
_SHOWN = 4
Flags = tuple[bool, ...]
Forward = Callable[[Any], Any]


class Build(Protocol):
    def __call__(self, *, again: bool) -> DistributedDataParallel: ...


class Replicas:
    """Calls the DDP wrapper of `step` for the parameters that currently require gradients."""

    def __init__(self, step: nn.Module, build: Build, log: Log, agreement: Agreement) -> None:
        self._build, self._log = build, log
        self._names = [name.removeprefix("model.") for name, _ in step.named_parameters()]
        self._parameters = list(step.parameters())
        self._agreement = agreement
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._ddp = build(again=False)
        self._built: Counter[Flags] = Counter([tuple(self._flags)])
        self._kept: dict[Flags, DistributedDataParallel] = {}
        self._sync, self._unreduced = True, False
        self._before: list[tuple[int, int] | None] | None = None
        # Called with a new wrapper and the next batch. A first backward makes DDP rebuild its buckets.
        self.warm_up: Callable[[Forward, Any], None] | None = None

    def __call__(self, batch: Any) -> Any:
        # 30 ns per parameter
        flags = [parameter.requires_grad for parameter in self._parameters]
        if flags != self._flags:
            self._switch(flags, batch)
        # Gradients of earlier micro-batches do not show whether this backward, which reduces them, reaches a parameter.
        accumulates = self._sync and self._unreduced
        self._before = [_version(parameter) for parameter in self._parameters] if accumulates else None
        ddp = self._ddp
        if ddp.require_backward_grad_sync is not self._sync:
            ddp.require_backward_grad_sync = self._sync
        self._unreduced = not self._sync
        return ddp(batch)

    def without_gradient(self) -> list[str]:
        """The parameters that the backward of this rank did not reach, so that DDP has not completed its reduction."""
        before = self._before or [None] * len(self._flags)
        parts = enumerate(zip(self._parameters, self._flags, before, strict=True))
        return [
            self._names[number] for number, (p, flag, old) in parts if flag and (p.grad is None or _version(p) == old)
        ]

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
        self._require_agreement(flags, changed)
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
        self._ddp = self._build(again=True)
        trained = [self._names[number] for number in changed if flags[number]]
        frozen = [self._names[number] for number in changed if not flags[number]]
        parts = [f"{self._some(names)} {verb}" for names, verb in ((trained, "unfrozen"), (frozen, "frozen")) if names]
        self._log.info(f"ddp: rebuilt, because requires_grad changed: {'; '.join(parts)}")
        if self.warm_up is not None:
            self.warm_up(self._ddp, batch)

    def _require_reduced(self, changed: list[int]) -> None:
        if self._unreduced and any(parameter.grad is not None for parameter in self._parameters):
            raise TrainError(
                "requires-grad-in-step",
                f"requires_grad of {self._some([self._names[number] for number in changed])} changed between "
                "micro-batches of one step.",
                why="gradients of the earlier ones are not reduced yet, and DDP would reduce only those of the new set",
                fix="change requires_grad after an optimizer step, for example in a callback (on_step, on_epoch)",
            )

    def _require_agreement(self, flags: list[bool], changed: list[int]) -> None:
        agreed = self._agreement.reached_by(repr(flags))
        if agreed < collectives.world():
            states = ", ".join(f"{self._names[number]} to {flags[number]}" for number in changed[:_SHOWN])
            raise TrainError(
                "requires-grad-differs",
                f"This rank changed requires_grad of {plural(len(changed), 'parameter')} ({states}); "
                f"{agreed} of {collectives.world()} ranks made the same change.",
                why="DDP reduces the parameters that require gradients, which must be the same on every rank",
                fix="change requires_grad on every rank and before the same step; not inside "
                "`if trainer.is_main_process:`",
            )

    def _some(self, names: list[str]) -> str:
        rest = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + rest


def _version(parameter: Tensor) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
