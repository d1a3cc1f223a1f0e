"""The weights that the Trainer shows: for evaluations, as a state dict, and their exponential moving average.

If replicas train apart (`sync: {every: …}`), these are means over replicas, and everything here is collective.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from paceline.errors import TrainError
from paceline.parallel.ddp import broadcast_buffers
from paceline.parallel.same_call import meet
from paceline.parallel.shards import gather_full_tensors
from paceline.train.checkpointing.saver import Saver
from paceline.train.engine import Engine


class TrainedWeights:
    def __init__(self, engine: Engine, saver: Saver) -> None:
        self._engine, self._saver = engine, saver

    def shown(self) -> AbstractContextManager[None]:
        """Context manager in which the model has these weights, and the same buffers on all ranks, to be evaluated."""
        if self._engine.replica_average is None:
            broadcast_buffers(self._engine.model, self._engine.mesh)
            return nullcontext()
        self._saver.wait_for_copy()  # a save may still be copying the weights
        return self._engine.replica_average.swapped()

    def averaged(self) -> AbstractContextManager[None]:
        """Context manager in which the model has the averaged (EMA) weights."""
        average, replicas = self._engine.average, self._engine.replica_average
        if average is None:
            raise TrainError(
                "no-ema", "No averaged weights: ema is not set.", fix="set Trainer(…, ema=0.999), or ema: 0.999"
            )
        self._saver.wait_for_copy()
        if replicas is None:
            return average.swapped()
        meet()
        # The EMA is linear: the mean of the replicas' EMAs is the EMA of their mean weights.
        return average.swapped(replicas.of(average.state_dict()))

    def state_dict(self) -> dict[str, Tensor]:
        """The full weights; if parameters are sharded, on rank 0 only. Means over replicas are copies."""
        if self._engine.replica_average is None:
            return self._full()
        meet()
        self._saver.wait_for_copy()
        with self._engine.replica_average.swapped():
            state = self._full()
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    def _full(self) -> dict[str, Tensor]:
        state = self._engine.model.state_dict()
        return state if self._engine.sharded is None else gather_full_tensors(state, self._engine.mesh)
