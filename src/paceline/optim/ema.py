"""An average of the weights over the steps, which often evaluates better than the last ones.

    average = Average(dict(model.named_parameters()), decay=0.999, warmup=True)
    average.update(step)              # after every optimizer step
    with average.swapped():           # the model computes with the averaged weights
        evaluate(model)

Every floating-point parameter has a copy in float32 (or wider), frozen ones too; buffers are the model's own. Where
a model is cut over ranks, the parameters given here are a rank's own pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.run.folder import CONFIG


class Ema:
    """The exponential moving average of a model's parameters, which begins at their values at construction."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, warmup: bool) -> None:
        named = {name: parameter for name, parameter in parameters.items() if parameter.is_floating_point()}
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

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step`, counted from 1.

        With warm-up the memory is short at first, so that the initial weights are soon forgotten.
        """
        decay = min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay
        if self._same_dtypes:
            torch._foreach_lerp_(self._averages, self._parameters, 1.0 - decay)
            return
        # One at a time: a second wide copy of a large half-precision model at once may not fit.
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(parameter.to(average.dtype), 1.0 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model computes with the averages; afterwards with its own weights again, bit for bit.

        Contents are copied and no pointer changes, so DDP, compiled models and captured graphs do not notice. Enter it
        outside of autocast, which keeps the half-precision copies of weights that it has seen.
        """
        own = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self.is_swapped = True
            self._overwrite(self._averages)
            yield
        finally:
            self._overwrite(own)
            self.is_swapped = False

    @torch.no_grad()
    def _overwrite(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, values)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, not copies of them, by the parameters' names; shared parameters once, by their first name."""
        return dict(zip(self._names, self._averages, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        mine = self.state_dict()
        if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in mine.items()}:
            raise CheckpointError(
                "other-model",
                "The averaged weights of the checkpoint have other names or shapes than this model's parameters.",
                fix=f"build the model with the options it was saved with ({CONFIG} in the run folder)",
            )
        for name, average in mine.items():
            average.copy_(state[name])
