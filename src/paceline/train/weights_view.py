"""What leaves a run: the weights that checkpoints, `state_dict`, exports and evaluations have.

    view = weights_view(engine)
    view = replace(view, entries=adapters_only)      # a feature of training returns a view of its own

If replicas train apart (`sync: {every: …}`), these are means over replicas, and whatever needs them is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from paceline.errors import TrainError
from paceline.parallel.data_parallel import broadcast_buffers
from paceline.parallel.shards import gather_full_tensors
from paceline.runtime.mesh import Mesh
from paceline.runtime.method_check import require_same_method

if TYPE_CHECKING:
    from paceline.train.engine import Engine


def _no_average() -> NoReturn:
    raise TrainError("no-ema", "No averaged weights: ema is not set.")


@dataclass(frozen=True)
class WeightsView:
    """The functions of this record are what a feature may replace."""

    model: nn.Module
    mesh: Mesh
    is_sharded: bool
    # `model.state_dict`, or less, or by other names. A checkpoint is loaded into what it returns with keep_vars=True.
    entries: Callable[..., dict[str, Any]]
    # A context manager in which the model has the weights that leave the run; None if it always has them.
    swapped: Callable[[], AbstractContextManager[None]] | None = None
    # The means over replicas of tensors by name; None if replicas have the same.
    means: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    # A context manager in which it has the averaged (EMA) weights.
    averaged: Callable[[], AbstractContextManager[None]] = _no_average

    @property
    def has_average(self) -> bool:
        return self.averaged is not _no_average

    def evaluated(self) -> AbstractContextManager[None]:
        """Context manager in which the model has these weights, and the same buffers on all ranks, to be evaluated."""
        if self.swapped is not None:
            return self.swapped()
        broadcast_buffers(self.model, self.mesh)
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """The full weights; if parameters are sharded, on rank 0 only. Means over replicas are copies."""
        if self.swapped is None:
            return self._full()
        require_same_method()
        with self.swapped():
            return {name: each.clone() if isinstance(each, Tensor) else each for name, each in self._full().items()}

    def _full(self) -> dict[str, Tensor]:
        return gather_full_tensors(self.entries(keep_vars=True), self.mesh) if self.is_sharded else self.entries()


def weights_view(engine: Engine) -> WeightsView:
    view = WeightsView(engine.parts.model, engine.mesh, engine.bound.held is not None, engine.parts.model.state_dict)
    for change in engine.hooks.view:
        view = change(view)
    return view
