"""The outer optimizer of local steps: what a round makes of the changes of all replicas.

A round computes the mean over replicas of (weights - outer weights), where the outer weights are those that all
replicas had after the previous round.

| outer      | new weights of every replica                                                         |
|------------|--------------------------------------------------------------------------------------|
| `average`  | outer weights + mean change: the mean of the weights (local SGD)                     |
| `nesterov` | a step of SGD with Nesterov momentum, whose gradient is the mean change × -1 (DiLoCo) |

With `compress: int8`, what rounding took from a replica's change is added to its next one (error feedback).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.config.sections import SyncSection
from paceline.sync.casts import cast_mean, int8_mean
from paceline.sync.exchange import Exchange
from paceline.sync.flat_tensors import FlatTensors

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class OuterState:
    """Outer weights, momentum and error feedback of tensors of one dtype. `weights` are equal on all replicas now."""

    def __init__(self, weights: FlatTensors, section: SyncSection, exchange: Exchange) -> None:
        self.weights, self._exchange, self._compress = weights, exchange, section.compress
        self._outer, copied = section.outer, weights.pack(weights.whole)
        # The plain mean of weights needs nothing to compare them with.
        compares = section.compress is not None or section.outer.name == "nesterov"
        self._flat: dict[str, Tensor] = {"weights": copied} if compares else {}
        if section.outer.name == "nesterov":
            self._flat["momentum"] = torch.zeros_like(copied)
        if section.compress == "int8":
            self._flat["feedback"] = torch.zeros_like(copied)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Views of `weights`, `momentum` and `feedback`, as far as there are any, by the names of the tensors."""
        return {kind: self.weights.views(flat) for kind, flat in self._flat.items()}

    def step(self, piece: slice) -> Tensor:
        """Set these elements of the weights to the result of a round, equal on all replicas. Collective. Returns two
        sums of squares in this replica: of its distance from the mean of all weights, and of that mean."""
        own = self.weights.pack(piece)
        outer = self._flat["weights"][piece] if "weights" in self._flat else None
        mean = self._mean(piece, own if outer is None else own - outer)
        if outer is None:
            new = average = mean
        else:
            average = outer + mean
            outer.copy_(average if self._outer.name == "average" else self._nesterov(piece, outer, mean))
            new = outer
        self.weights.unpack(piece, new)
        return torch.stack([torch.linalg.vector_norm(own - average), torch.linalg.vector_norm(average)]).double() ** 2

    def _mean(self, piece: slice, change: Tensor) -> Tensor:
        """The mean over replicas, in the format of `compress`."""
        if self._compress == "int8":
            feedback = self._flat["feedback"][piece]
            mean, lost = int8_mean(change + feedback, self._exchange)
            feedback.copy_(lost)
            return mean
        if self._compress is not None:
            return cast_mean(change, _DTYPES[self._compress], self._exchange)
        return plain_mean(change, self._exchange)

    def _nesterov(self, piece: slice, outer: Tensor, change: Tensor) -> Tensor:
        momentum = self._flat["momentum"][piece]
        momentum.mul_(self._outer.momentum).sub_(change)
        return outer - self._outer.lr * (self._outer.momentum * momentum - change)

    def take_over(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors of `tensors()`, as far as they are given."""
        for kind, views in self.tensors().items():
            for name, view in views.items():
                if name in saved.get(kind, {}):
                    view.copy_(saved[kind][name])


def plain_mean(flat: Tensor, exchange: Exchange) -> Tensor:
    """Divided before the sum, which would overflow in float16."""
    mean = flat / exchange.ranks
    exchange.all_reduce(mean)
    return mean
