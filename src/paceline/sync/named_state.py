"""Tensors that a compression keeps from step to step, by parameter name.

DDP hands out flat buckets, and what is kept for a bucket is flat as well: one operation then covers all its parameters.
Which parameters share a bucket changes when DDP rebuilds its buckets, so a bucket that is new collects the values of
its parameters wherever they are.

Of each tensor there are two copies, the value and the next one. The next value replaces the other when the step has
ended, if the gradients of all buckets were finite; else the step is skipped, and every value stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Slot(NamedTuple):
    """The place of a parameter in a flat tensor."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.size)

    def of(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


class KeptTensor:
    """`copies[current]` is the value, the other copy the next one."""

    def __init__(self, slots: Sequence[Slot], like: Tensor) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.copies, self.current = (torch.zeros_like(like), torch.zeros_like(like)), 0

    @property
    def value(self) -> Tensor:
        return self.copies[self.current]

    @property
    def next(self) -> Tensor:
        return self.copies[1 - self.current]

    def end_step(self, finite: Tensor) -> None:
        if finite.is_cuda:  # without waiting for the device
            torch.where(finite, self.next, self.value, out=self.value)
        elif finite:
            self.current = 1 - self.current


class NamedState:
    def __init__(self, initial: Callable[[str, Tensor], object] | None = None) -> None:
        """`initial` sets the value of a parameter that has none; default: zero."""
        self._initial = initial
        self._owners: dict[str, KeptTensor] = {}
        self._loaded: dict[str, Tensor] = {}

    def collect(self, slots: Sequence[Slot], like: Tensor) -> KeptTensor:
        """A tensor like `like` that has the current values in its slots."""
        kept = KeptTensor(slots, like)
        for slot in slots:
            view, before = slot.of(kept.value), self._get(slot.name)
            if before is not None:
                view.copy_(before)
            elif self._initial is not None:
                self._initial(slot.name, view)
            self._owners[slot.name] = kept
            self._loaded.pop(slot.name, None)
        return kept

    def state(self) -> dict[str, Tensor]:
        found = {name: kept.slots[name].of(kept.value) for name, kept in self._owners.items()}
        return {**self._loaded, **found}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._owners.clear()
        self._loaded = dict(tensors)

    def _get(self, name: str) -> Tensor | None:
        kept = self._owners.get(name)
        return self._loaded.get(name) if kept is None else kept.slots[name].of(kept.value)


class StepEnd:
    """Ends a step for all tensors of its buckets, when the last bucket is done."""

    def __init__(self) -> None:
        self._finite: list[Tensor] = []
        self._changed: list[KeptTensor] = []

    def add(self, is_first: bool, is_last: bool, finite: Tensor, *changed: KeptTensor) -> None:
        if is_first:  # also after a backward that failed
            self._finite, self._changed = [], []
        self._finite.append(finite)
        self._changed.extend(changed)
        if is_last:
            all_finite = torch.stack(self._finite).all()
            for kept in self._changed:
                kept.end_step(all_finite)


def add_unscaled(kept: Tensor, gradients: Tensor, scale: Tensor | float, *, out: Tensor) -> None:
    """Add gradients without their loss scale to what is kept."""
    if isinstance(scale, Tensor):
        torch.addcmul(kept, gradients, 1.0 / scale, out=out)
    else:
        torch.add(kept, gradients, alpha=1.0 / scale, out=out)
