"""The random numbers of a training run: seeds of the generators, and the keys of dropout masks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.config.recipe import Config
from paceline.models.dropout.scopes import by_sample
from paceline.parallel.compose import Wrapped
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.tensor.apply import is_sequence_parallel
from paceline.runtime import rng
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext


def noise_context(
    config: Config, model: nn.Module, blocks: Sequence[str], mesh: Mesh, wrapped: Wrapped
) -> NoiseContext:
    """The context of training steps. `blocks`: their names in the full model."""
    if config.dropout == "per-rank" or isinstance(wrapped.forward, DataParallel):  # threads would share the keys
        return NoiseContext(config.seed)
    keys = by_sample(model, blocks, config.seed, mesh.device)
    keys.attention = config.dropout == "exact" or config.deterministic == "everywhere"
    return NoiseContext(config.seed, keys=keys)


def seed_generators(config: Config, model: nn.Module, mesh: Mesh, step: int) -> None:
    """Seed the generators differently on each data rank, after the model is initialized equally."""
    apart = mesh.degrees.tensor > 1 and is_sequence_parallel(model, config.tensor)
    rank = mesh.noise_rank(tokens_apart=apart)
    rng.seed_everything(rng.derive_seed(config.seed, step + 1, rank) >> 1)
