"""Which passes turn a model into a laid-out step, in which order, and which settings are incompatible.

`parallel/compose.py` executes them. They are declared here, without torch, so that `paceline config show` prints them
and incompatible settings are found before any rank starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.config.components import OPTIMIZERS
from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan.layout import Degrees, LayoutPlan


@dataclass(frozen=True)
class Pass:
    """One step of laying out a model. Passes on the step follow those on the model, which the step is built around."""

    name: str
    target: Literal["model", "step"]
    reason: str
    applies: Callable[[Config, Degrees], bool]


def is_sharded(config: Config, degrees: Degrees) -> bool:
    """Whether some rank does not hold the full model on its device."""
    return not degrees.is_replicated or config.fsdp.offload


def _uses_fsdp(config: Config, degrees: Degrees) -> bool:
    """Beside a tensor or pipeline axis FSDP2 also replicates: DDP does not take parameters that are DTensors."""
    replicates = degrees.replicate > 1 and not degrees.is_replicated
    return config.fsdp.offload or degrees.shard > 1 or replicates


def _splits(config: Config, degrees: Degrees) -> bool:
    return config.strategy == "split" and not is_sharded(config, degrees)


# In the order in which `parallel/compose.py` executes them.
PASSES = (
    Pass(
        "precision",
        "model",
        "first, so that weights are placed, sharded and broadcast in the dtype in which they are trained",
        lambda config, degrees: config.precision != "fp32",
    ),
    Pass(
        "placement",
        "model",
        "the full model on its device, before anything is wrapped around it",
        lambda config, degrees: not is_sharded(config, degrees) and config.strategy != "split",
    ),
    Pass(
        "split",
        "model",
        "layers on their devices, before anything is wrapped around them",
        lambda config, degrees: _splits(config, degrees),
    ),
    Pass(
        "broadcast",
        "model",
        "rank 0's weights on every rank while they are full, before each rank keeps a part of them",
        lambda config, degrees: is_sharded(config, degrees) and degrees.world > 1,
    ),
    Pass(
        "pipeline",
        "model",
        "before the other parallelisms, which then see this rank's layers only",
        lambda config, degrees: degrees.pipeline > 1,
    ),
    Pass(
        "sync_batchnorm",
        "model",
        "before compile, which traces the layers that synchronize",
        lambda config, degrees: config.sync_batchnorm and degrees.data_ranks > 1,
    ),
    Pass(
        "tensor",
        "model",
        "while weights are full: FSDP2 can shard a tensor-parallel shard again, but not the other way round",
        lambda config, degrees: degrees.tensor > 1,
    ),
    Pass(
        "recompute",
        "model",
        "inside compile and FSDP2: recomputed blocks run compiled, on gathered weights",
        lambda config, degrees: config.recompute != "off",
    ),
    Pass(
        "compile",
        "model",
        "inside FSDP2 and DDP, whose hooks communicate and do not belong in a graph",
        lambda config, degrees: bool(config.compile),
    ),
    Pass(
        "fsdp",
        "step",
        "around the step: weights are gathered before a block runs, gradients reduced when its backward is done",
        _uses_fsdp,
    ),
    Pass(
        "ddp",
        "step",
        "around the step: gradients are averaged during the backward",
        lambda config, degrees: degrees.replicate > 1 and not _uses_fsdp(config, degrees),
    ),
    Pass(
        "data_parallel",
        "step",
        "around the step, which runs on a copy of the model on each GPU",
        lambda config, degrees: config.strategy == "dp" and not is_sharded(config, degrees),
    ),
    Pass(
        "microbatches",
        "step",
        "around the step, which runs once for each part of a batch",
        lambda config, degrees: _splits(config, degrees) and config.split.microbatches > 1,
    ),
    Pass(
        "materialize",
        "step",
        "last: each rank allocates and initializes only its shards of a model that is on the meta device",
        is_sharded,
    ),
    Pass(
        "tied_parameters",
        "step",
        "after all weights have values: copies on other stages take those of the original",
        lambda config, degrees: degrees.pipeline > 1,
    ),
)


@dataclass(frozen=True)
class Incompatible:
    """Two things that do not go together."""

    pair: str
    code: str
    applies: Callable[[Config, Degrees], bool]
    why: str
    fix: str


INCOMPATIBLE = (
    Incompatible(
        "micro_batch: auto × a layout",
        "finder-and-layout",
        lambda config, degrees: (
            config.micro_batch == "auto" and (not degrees.is_replicated or config.strategy == "split")
        ),
        "sizes are tried on one device with the whole model, which says nothing about a part of it",
        "set micro_batch to a number",
    ),
    Incompatible(
        "pipeline × zero-bubble × compile",
        "zero-bubble-and-compile",
        lambda config, degrees: (
            degrees.pipeline > 1 and config.pipeline.schedule == "zero-bubble" and bool(config.compile)
        ),
        "zero-bubble runs each backward in two halves, of which a compiled one has only the whole",
        "leave compile out, or use pipeline.schedule: 1f1b",
    ),
    Incompatible(
        "pipeline × zero-bubble × recompute",
        "zero-bubble-and-recompute",
        lambda config, degrees: (
            degrees.pipeline > 1 and config.pipeline.schedule == "zero-bubble" and config.recompute != "off"
        ),
        "zero-bubble runs each backward in two halves, and each of them would compute the block again",
        "leave recompute off, or use pipeline.schedule: 1f1b",
    ),
    Incompatible(
        "adafactor or muon × cut weights",
        "optimizer-needs-whole-weights",
        lambda config, degrees: OPTIMIZERS.facts(config.optimizer.name).needs_full and not degrees.is_replicated,
        "they work on whole matrices, of which each rank holds a part",
        "use adamw, adam or sgd; or strategy: ddp",
    ),
    Incompatible(
        "pipeline × compile: model",
        "pipeline-and-compile",
        lambda config, degrees: degrees.pipeline > 1 and config.compile == "model",
        "no rank holds the whole model",
        "set compile: true, which compiles block by block",
    ),
)


def require_allowed(config: Config, plan: LayoutPlan) -> None:
    """Raise what the table of refused pairs says."""
    for refused in INCOMPATIBLE:
        if refused.applies(config, plan.degrees):
            raise LayoutError(
                refused.code,
                f"The recipe asks for {refused.pair}, on the layout {plan.degrees}.",
                why=refused.why,
                fix=refused.fix,
            )


def passes_for(config: Config, degrees: Degrees) -> list[Pass]:
    """The passes of a run, in the order of execution."""
    return [each for each in PASSES if each.applies(config, degrees)]
