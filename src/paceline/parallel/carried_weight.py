"""The weight of a step, reduced inside one of DDP's gradient buckets.

If losses have weights that depend on the data, ranks need their sum in every step. An all-reduce of its own costs a
small model a tenth of its step. Instead, DDP is given one more parameter, which nothing else knows: it is part of the
step only while a wrapper is built. Its gradient is passed to `torch.autograd.backward` beside that of the loss.

DDP averages in float32, so a weight is sent as digits of a fixed-point number, whose sums are recovered exactly by
rounding. The sum of token counts is exact, that of other weights has an error of 1e-11 relative to the nominal weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import frexp, isfinite, ldexp

import torch
from torch import Tensor, nn

_DIGITS = 4
_BITS = {torch.float32: 12, torch.float64: 24}  # of a digit: with the rounding of an average, below the mantissa
_MOST_RANKS = 24  # from here on, the rounding of averages over a number that is no power of two could reach one half
_MOST_POWER = 2048  # digits of so many ranks have a sum that float32 represents


class CarriedWeight:
    def __init__(self, dtype: torch.dtype, ranks: int) -> None:
        self.slot = nn.Parameter(torch.zeros(_DIGITS, dtype=dtype))
        self._ranks, self._bits = ranks, _BITS[dtype]
        self._unit = 0  # the exponent of the last digit

    @classmethod
    def for_buckets_of(cls, parameters: Iterable[Tensor], ranks: int) -> CarriedWeight | None:
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
