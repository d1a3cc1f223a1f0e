"""Exponential moving average (EMA) of the parameters.

    ema = Ema(dict(model.named_parameters()), decay=0.999, warmup=True)
    ema.update(step)              # after every optimizer step
    with ema.swapped():           # the model uses the averaged parameters
        evaluate(model)

Every floating-point parameter, frozen ones included, is averaged in float32 or wider; buffers are not averaged. If the
model is sharded, `parameters` are the local shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.run.folder import CONFIG


class Ema:
    """The exponential moving average of parameters, initialized with their current values.

    `captured`: updates are captured in a graph, which reads a weight that differs between steps from the device."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, warmup: bool, *, captured: bool = False) -> None:
        named = {name: p for name, p in parameters.items() if p.is_floating_point() or p.is_complex()}
        self._decay, self._warmup = decay, warmup
        self.is_swapped = False
        self._names = list(named)
        self._parameters: list[Tensor] = list(named.values())
        self._averages = [
            parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for parameter in self._parameters
        ]
        pairs = zip(self._averages, self._parameters, strict=True)
        self._same_dtypes = all(average.dtype == parameter.dtype for average, parameter in pairs)
        devices = [average.device for average in self._averages] if captured and warmup else []
        self.device_weight = torch.zeros((), dtype=torch.float64, device=devices[0]) if devices else None
        self._sent = 0.0

    def weight(self, step: int) -> float:
        """The weight of the parameters after optimizer step `step`, counted from 1.

        With warm-up it starts high, so that the initial parameters are forgotten quickly.
        """
        return 1.0 - (min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay)

    def send_weight(self, step: int) -> None:
        """Copy the weight of the update in optimizer step `step`, counted from 0, to the device."""
        weight = self.weight(step + 1)
        if self.device_weight is not None and weight != self._sent:
            self._sent = weight
            self.device_weight.fill_(weight)

    @torch.no_grad()
    def update(self, step: int, stepped: bool = True) -> None:
        """Update the average after optimizer step `step`, counted from 1, if it was taken."""
        if not stepped:
            return
        weight = self.weight(step) if self.device_weight is None else self.device_weight
        if self._same_dtypes and not isinstance(weight, Tensor):
            torch._foreach_lerp_(self._averages, self._parameters, weight)
            return
        # One at a time: a float32 copy of a large half-precision model may not fit in memory.
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            share = weight.to(average.dtype) if isinstance(weight, Tensor) else weight
            average.lerp_(parameter.to(average.dtype), share)

    @contextmanager
    def swapped(self, averages: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Use the averaged parameters, or the given ones, inside the context, and restore the original ones bit for bit
        on exit.

        Values are copied in place, so DDP, compiled models and captured graphs stay valid. Enter it outside of
        autocast, which caches half-precision copies of parameters.
        """
        own = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self.is_swapped = True
            self._overwrite(self._averages if averages is None else [averages[name] for name in self._names])
            yield
        finally:
            self._overwrite(own)
            self.is_swapped = False

    @torch.no_grad()
    def _overwrite(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, values)

    def state_dict(self) -> dict[str, Tensor]:
        """References to the averages by parameter name; shared parameters once, under their first name."""
        return dict(zip(self._names, self._averages, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        mine = self.state_dict()
        if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in mine.items()}:
            raise CheckpointError(
                "other-model",
                "The EMA parameters of the checkpoint do not match the names or shapes of this model's parameters.",
                fix=f"build the model with the options of the saved run ({CONFIG} in the run folder)",
            )
        for name, average in mine.items():
            average.copy_(state[name])
