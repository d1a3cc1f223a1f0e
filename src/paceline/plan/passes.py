"""The passes that apply a layout to a model, in order, and the incompatible settings.

`parallel/parallelize.py` executes the passes. They are declared here, without torch, so that `paceline config show` can
print them and incompatible settings are rejected before any rank starts. What users read about them is in passes.toml
next to this file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.config.components import OPTIMIZERS
from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan.layout import Degrees, LayoutPlan

Condition = Callable[[Config, Degrees], bool]


@dataclass(frozen=True)
class Pass:
    """One transformation of the model, or of the training step that is built around the model."""

    name: str
    target: Literal["model", "step"]
    reason: str
    applies: Condition


def is_sharded(config: Config, degrees: Degrees) -> bool:
    """Whether no rank holds the full model on its device."""
    return not degrees.is_replicated or config.fsdp.offload


def _every(config: Config) -> bool:
    return config.sync is not None and config.sync.every is not None


def uses_local_steps(config: Config, degrees: Degrees) -> bool:
    """Whether replicas step by themselves and exchange their weights now and then, instead of their gradients."""
    return _every(config) and degrees.replicate > 1


def _uses_fsdp(config: Config, degrees: Degrees) -> bool:
    """With a tensor or pipeline axis FSDP2 also replicates, because DDP does not support DTensor parameters."""
    replicates = degrees.replicate > 1 and not (degrees.is_replicated or uses_local_steps(config, degrees))
    return config.fsdp.offload or degrees.shard > 1 or replicates


def _replicates(config: Config, degrees: Degrees) -> bool:
    """Whether DDP reduces the gradients of replicas."""
    others = _uses_fsdp(config, degrees) or config.fixed_order or uses_local_steps(config, degrees)
    return degrees.replicate > 1 and not others


def _synchronizes_norms(config: Config, degrees: Degrees) -> bool:
    ranks = degrees.shard if uses_local_steps(config, degrees) else degrees.data_ranks
    return config.sync_batchnorm and ranks > 1 and not config.fixed_order


def _splits(config: Config, degrees: Degrees) -> bool:
    return config.strategy == "split" and not is_sharded(config, degrees)


def _is_divided(config: Config, degrees: Degrees) -> bool:
    """Whether the model is sharded, or on several devices of one process."""
    return is_sharded(config, degrees) or config.strategy in ("dp", "split")


def _zero_bubble(config: Config, degrees: Degrees) -> bool:
    return degrees.pipeline > 1 and config.pipeline.schedule == "zero-bubble"


def _compresses(config: Config) -> bool:
    """Whether the gradients of every step are compressed; with `every`, it is what a round sends."""
    return config.sync is not None and config.sync.compress is not None and config.sync.every is None


_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

# In the order in which `parallel/parallelize.py` executes them.
_NEEDED: Mapping[str, Condition] = {
    "precision": lambda config, degrees: config.precision != "fp32",
    "placement": lambda config, degrees: not is_sharded(config, degrees) and config.strategy != "split",
    "split": _splits,
    "broadcast": lambda config, degrees: degrees.world > 1 and not _replicates(config, degrees),
    "channels_last": lambda config, degrees: config.channels_last,
    "pipeline": lambda config, degrees: degrees.pipeline > 1,
    "sync_batchnorm": _synchronizes_norms,
    "tensor": lambda config, degrees: degrees.tensor > 1,
    "recompute": lambda config, degrees: config.recompute != "off",
    "compile": lambda config, degrees: bool(config.compile),
    "fsdp": _uses_fsdp,
    "ddp": _replicates,
    "data_parallel": lambda config, degrees: config.strategy == "dp" and not is_sharded(config, degrees),
    "microbatches": lambda config, degrees: _splits(config, degrees) and config.split.microbatches > 1,
    "materialize": is_sharded,
    "tied_parameters": lambda config, degrees: degrees.pipeline > 1,
}
PASSES = tuple(Pass(name, applies=applies, **_TEXTS["passes"][name]) for name, applies in _NEEDED.items())


@dataclass(frozen=True)
class Incompatible:
    """A combination of settings that is not supported."""

    code: str
    settings: str
    applies: Condition
    why: str
    fix: str


_REFUSED: Mapping[str, Condition] = {
    "every-and-fsdp": lambda config, degrees: _every(config) and degrees.world > 1 and degrees.replicate == 1,
    "every-and-offload": lambda config, degrees: _every(config) and config.fsdp.offload,
    "every-and-one-process": lambda config, degrees: _every(config) and config.strategy in ("dp", "split"),
    "every-and-everywhere": lambda config, degrees: _every(config) and config.fixed_order,
    "finder-and-layout": lambda config, degrees: (
        config.micro_batch == "auto" and (not degrees.is_replicated or config.strategy == "split")
    ),
    "bucket-size-and-preflight": lambda config, degrees: config.ddp.bucket_mb == "auto" and not config.preflight,
    "zero-bubble-and-compile": lambda config, degrees: _zero_bubble(config, degrees) and bool(config.compile),
    "zero-bubble-and-recompute": lambda config, degrees: _zero_bubble(config, degrees) and config.recompute != "off",
    "optimizer-needs-whole-weights": lambda config, degrees: (
        OPTIMIZERS.facts(config.optimizer.name).needs_full and not degrees.is_replicated
    ),
    "pipeline-and-compile": lambda config, degrees: degrees.pipeline > 1 and config.compile == "model",
    "channels-last-and-pipeline": lambda config, degrees: config.channels_last and degrees.pipeline > 1,
    "everywhere-and-layout": lambda config, degrees: config.fixed_order and _is_divided(config, degrees),
    "everywhere-and-finder": lambda config, degrees: config.fixed_order and config.micro_batch == "auto",
    "everywhere-and-dropout": lambda config, degrees: config.fixed_order and config.dropout == "per-rank",
    "everywhere-and-compile": lambda config, degrees: config.fixed_order and bool(config.compile),
    "compress-and-layout": lambda config, degrees: _compresses(config) and _is_divided(config, degrees),
    "compress-and-everywhere": lambda config, degrees: _compresses(config) and config.fixed_order,
    "compress-and-graph": lambda config, degrees: _compresses(config) and config.graph,
    "every-and-powersgd": lambda config, degrees: (
        config.sync is not None and config.sync.every is not None and config.sync.compress == "powersgd"
    ),
    "graph-and-layout": lambda config, degrees: config.graph and (degrees.world > 1 or _is_divided(config, degrees)),
    "graph-and-everywhere": lambda config, degrees: config.graph and config.fixed_order,
    "graph-and-finder": lambda config, degrees: config.graph and config.micro_batch == "auto",
}
INCOMPATIBLE = tuple(
    Incompatible(code, applies=applies, **_TEXTS["refused"][code]) for code, applies in _REFUSED.items()
)


def require_allowed(config: Config, plan: LayoutPlan) -> None:
    """Raise LayoutError for a combination of settings in INCOMPATIBLE."""
    for each in INCOMPATIBLE:
        if each.applies(config, plan.degrees):
            raise LayoutError(
                each.code,
                f"Unsupported combination: {each.settings} (layout {plan.degrees}).",
                why=each.why,
                fix=each.fix,
            )


def passes_for(config: Config, degrees: Degrees) -> list[Pass]:
    """The passes of a run, in execution order."""
    return [each for each in PASSES if each.applies(config, degrees)]
