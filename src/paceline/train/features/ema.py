"""`ema`: the moving average of the parameters, which follows each update, is saved, and can be evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import ShardedState, ShardedStateful, StateEntry
from paceline.config.recipe import Config
from paceline.optim.ema import Ema
from paceline.parallel.shards import local_shard
from paceline.runtime.method_check import require_same_method
from paceline.train.checkpointing.model_state import shard_of
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks
from paceline.train.weights_view import WeightsView


def average_of(model: nn.Module, config: Config) -> Ema | None:
    """Call after wrapping, which broadcasts the weights of rank 0."""
    if config.ema is None:
        return None
    shards = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    return Ema(shards, config.ema.decay, config.ema.warmup, captured=config.graph)


def build(context: FeatureContext) -> Hooks | None:
    average = context.average
    if average is None:
        return None
    parameters = dict(context.parts.model.named_parameters())

    def view(plain: WeightsView) -> WeightsView:
        def averaged() -> AbstractContextManager[None]:
            if plain.means is None:
                return average.swapped()
            require_same_method()
            # The EMA is linear: the mean of the replicas' EMAs is the EMA of their mean weights.
            return average.swapped(plain.means(average.state_dict()))

        return replace(plain, averaged=averaged)

    def restart() -> None:
        average.load_state_dict({name: local_shard(parameters[name]) for name in average.state_dict()})

    entry = StateEntry("ema", EmaState(average, parameters, context.parts.tied_copies), scope="weights", volatile=False)
    return Hooks(
        name="ema",
        before_update=None if average.device_weight is None else average.send_weight,
        after_update=average.update,
        state=[entry],
        view=view,
        restart=restart,
    )


class EmaState(ShardedStateful):
    """The EMA weights. Those missing in a checkpoint are initialized from its weights."""

    def __init__(self, average: Ema, parameters: Mapping[str, Tensor], copies: Mapping[str, str]) -> None:
        self._average, self._parameters, self._copies = average, parameters, copies

    def sharded_state(self) -> ShardedState:
        own = {name: each for name, each in self._average.state_dict().items() if name not in self._copies}
        return ShardedState({f"ema/{name}": shard_of(each, self._parameters[name]) for name, each in own.items()})

    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        return {path: self._parameters[name] for name, path in self._paths(checkpoint).items()}

    def _paths(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The path that each average is read from."""
        saved = {name: self._copies.get(name, name) for name in self._average.state_dict()}
        has = checkpoint.manifest.entry
        return {name: f"{'model' if has(f'ema/{own}') is None else 'ema'}/{own}" for name, own in saved.items()}

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        self._average.load_state_dict({name: tensors[path] for name, path in self._paths(checkpoint).items()})
