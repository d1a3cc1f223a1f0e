"""The moving average of the parameters, after each update."""

from __future__ import annotations

from torch import nn

from paceline.config.recipe import Config
from paceline.optim.ema import Ema
from paceline.parallel.shards import local_shard
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks


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
    send = None if average.device_weight is None else average.send_weight
    return Hooks(name="ema", before_update=send, after_update=average.update)
