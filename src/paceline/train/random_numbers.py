"""The random numbers of a training run: seeds of the generators, and the keys of dropout masks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from paceline.config.recipe import Config
from paceline.models.dropout.functions import by_sample
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.model_parts import ModelParts
from paceline.plan.layout import FROM_SETTINGS, Derived
from paceline.runtime import rng
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext


def noise_context(config: Config, parts: ModelParts, mesh: Mesh, loss_fn: Any) -> NoiseContext:
    """The context of training steps."""
    if config.dropout == "per-rank" or isinstance(parts.forward, DataParallel):  # threads would share the keys
        return NoiseContext(config.seed)
    model = parts.model
    keys = by_sample(model, parts.all_blocks, config.seed, mesh.device)
    keys.exact_attention = config.dropout == "exact" or config.deterministic == "everywhere"
    keys.splits = loss_fn is None
    keys.lazy = not any(module._compiled_call_impl is not None for module in model.modules())
    return NoiseContext(config.seed, keys=keys)


def seed_generators(config: Config, model: nn.Module, mesh: Mesh, step: int) -> None:
    """Seed the generators differently on each data rank, after the model is initialized equally."""
    apart = False
    if mesh.degrees.tensor > 1:
        from paceline.parallel.tensor.apply import is_sequence_parallel  # few runs need it

        apart = is_sequence_parallel(model, config.tensor)
    rank = mesh.noise_rank(tokens_apart=apart)
    rng.seed_everything(rng.derive_seed(config.seed, step + 1, rank) >> 1)


def dropout_rows(config: Config, model: nn.Module, draw: NoiseContext) -> dict[str, Derived]:
    """The row of the start table about dropout; none for a model without."""
    if not any(map(_drops, model.modules())):
        return {}
    if config.dropout == "per-rank":
        value, reason = "per rank", f"{FROM_SETTINGS}: masks depend on the number of ranks"
    elif draw.keys is None:
        value, reason = "per GPU", 'strategy="dp": masks depend on the number of GPUs'
    elif draw.keys.exact_attention or draw.keys.device.type == "cpu":
        value, reason = "by sample", "the same masks on any layout"
    else:
        value, reason = "by sample", 'the same masks on any layout, except in fused attention: see dropout="exact"'
    return {"dropout": Derived(value, reason)}


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    members = vars(module).items()  # a module may call the function, with a probability of its own
    return any("drop" in name and isinstance(value, float) and 0.0 < value <= 1.0 for name, value in members)
