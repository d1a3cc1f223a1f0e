"""Which passes turn a model into a laid-out step, in which order, and which settings are incompatible.

`parallel/compose.py` executes them. They are declared here, without torch, so that `paceline config show` prints them
and incompatible settings are found before any rank starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.components import OPTIMIZERS
from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan.layout import Degrees, LayoutPlan


@dataclass(frozen=True)
class Pass:
    """One parallelism's place in the order."""

    place: int
    name: str
    reason: str
    applies: Callable[[Config, Degrees], bool]


# The order in which they are applied to a model, first to last.
PASSES = (
    Pass(
        1,
        "pipeline",
        "first, as it cuts the model: what follows sees this rank's layers only",
        lambda config, degrees: degrees.pipeline > 1,
    ),
    Pass(
        1,
        "split",
        "first: layers go to their devices before anything is put around them",
        lambda config, degrees: config.strategy == "split",
    ),
    Pass(
        2,
        "tensor",
        "while weights are whole: sharding can cut a tensor's part again, but not the other way round",
        lambda config, degrees: degrees.tensor > 1,
    ),
    Pass(
        3,
        "recompute",
        "inside compile and sharding: recomputed layers run as compiled ones, on gathered weights",
        lambda config, degrees: config.recompute != "off",
    ),
    Pass(
        4,
        "compile",
        "inside sharding, whose hooks wait for other ranks and have no place in a graph",
        lambda config, degrees: bool(config.compile),
    ),
    Pass(
        5,
        "shard",
        "last, around everything: weights are gathered before any layer runs, gradients leave when it is done",
        lambda config, degrees: degrees.shard > 1 or config.fsdp.offload,
    ),
    Pass(
        5,
        "replicate",
        "last, around everything: gradients are averaged when the backward has made them",
        lambda config, degrees: degrees.replicate > 1,
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
    """What is applied in this run, first to last."""
    return [applied for applied in PASSES if applied.applies(config, degrees)]
