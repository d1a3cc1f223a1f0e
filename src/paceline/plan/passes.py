"""The passes that apply a layout to a model, in order, and the incompatible settings.

`parallel/compose.py` executes the passes. They are declared here, without torch, so that `paceline config show` can
print them and incompatible settings are rejected before any rank starts.
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
    """One transformation of the model, or of the training step that is built around the model."""

    name: str
    target: Literal["model", "step"]
    reason: str
    applies: Callable[[Config, Degrees], bool]


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


# In the order in which `parallel/compose.py` executes them.
PASSES = (
    Pass(
        "precision",
        "model",
        "first, so that parameters are placed, sharded and broadcast in the dtype in which they are trained",
        lambda config, degrees: config.precision != "fp32",
    ),
    Pass(
        "placement",
        "model",
        "moves the full model to its device before it is wrapped",
        lambda config, degrees: not is_sharded(config, degrees) and config.strategy != "split",
    ),
    Pass("split", "model", "moves layers to their devices before they are wrapped", _splits),
    Pass(
        "broadcast",
        "model",
        "copies rank 0's parameters to every rank before they are sharded, or where DDP does not",
        lambda config, degrees: degrees.world > 1 and not _replicates(config, degrees),
    ),
    Pass(
        "channels_last",
        "model",
        "after placement, which allocates weights; before DDP and the optimizer, which take over their strides",
        lambda config, degrees: config.channels_last,
    ),
    Pass(
        "pipeline",
        "model",
        "before the other parallelisms, which then apply to the layers of this rank only",
        lambda config, degrees: degrees.pipeline > 1,
    ),
    Pass("sync_batchnorm", "model", "before compile, which traces the synchronized layers", _synchronizes_norms),
    Pass(
        "tensor",
        "model",
        "before FSDP2, which can shard tensor-parallel parameters; the reverse is not possible",
        lambda config, degrees: degrees.tensor > 1,
    ),
    Pass(
        "recompute",
        "model",
        "inside compile and FSDP2: recomputed blocks run compiled, on gathered parameters",
        lambda config, degrees: config.recompute != "off",
    ),
    Pass(
        "compile",
        "model",
        "inside FSDP2 and DDP, whose communication hooks must stay outside of the graph",
        lambda config, degrees: bool(config.compile),
    ),
    Pass(
        "fsdp",
        "step",
        "wraps the step: parameters are gathered before a block runs, gradients are reduced after its backward",
        _uses_fsdp,
    ),
    Pass("ddp", "step", "wraps the step: gradients are averaged during the backward", _replicates),
    Pass(
        "data_parallel",
        "step",
        "wraps the step, which runs on a replica of the model on each GPU",
        lambda config, degrees: config.strategy == "dp" and not is_sharded(config, degrees),
    ),
    Pass(
        "microbatches",
        "step",
        "wraps the step, which runs once for each part of a micro-batch",
        lambda config, degrees: _splits(config, degrees) and config.split.microbatches > 1,
    ),
    Pass(
        "materialize",
        "step",
        "last: each rank allocates and initializes only its own shards of a model on the meta device",
        is_sharded,
    ),
    Pass(
        "tied_parameters",
        "step",
        "after all parameters are initialized: copies a tied parameter to the other stages that use it",
        lambda config, degrees: degrees.pipeline > 1,
    ),
)


@dataclass(frozen=True)
class Incompatible:
    """A combination of settings that is not supported."""

    settings: str
    code: str
    applies: Callable[[Config, Degrees], bool]
    why: str
    fix: str


INCOMPATIBLE = (
    Incompatible(
        "sync.every without replicas of the model",
        "every-and-fsdp",
        lambda config, degrees: _every(config) and degrees.world > 1 and degrees.replicate == 1,
        "replicas train by themselves between rounds, but here all ranks hold shards of a single one",
        "shard inside each replica: layout: {replicate: 2, shard: auto}, or strategy: hsdp; or remove sync.every",
    ),
    Incompatible(
        "sync.every with fsdp.offload",
        "every-and-offload",
        lambda config, degrees: _every(config) and config.fsdp.offload,
        "replicas exchange weights on their GPUs, where these are not kept",
        "remove fsdp.offload, or sync.every",
    ),
    Incompatible(
        "sync.every with strategy: dp or split",
        "every-and-one-process",
        lambda config, degrees: _every(config) and config.strategy in ("dp", "split"),
        "these run in one process, which reduces gradients over no network",
        "remove sync.every, or launch several ranks with strategy: ddp",
    ),
    Incompatible(
        "sync.every with deterministic: everywhere",
        "every-and-everywhere",
        lambda config, degrees: _every(config) and config.fixed_order,
        "what replicas learn between rounds depends on their number",
        "use deterministic: true, which gives the same bits on the same layout, or remove sync.every",
    ),
    Incompatible(
        'micro_batch="auto" with a sharded or split model',
        "finder-and-layout",
        lambda config, degrees: (
            config.micro_batch == "auto" and (not degrees.is_replicated or config.strategy == "split")
        ),
        "micro-batch sizes are tried on one device with the full model",
        "set micro_batch to a number",
    ),
    Incompatible(
        "ddp.bucket_mb: auto with preflight: false",
        "bucket-size-and-preflight",
        lambda config, degrees: config.ddp.bucket_mb == "auto" and not config.preflight,
        "sizes are measured in the pre-flight, in steps of weight zero",
        "set ddp.bucket_mb to a number, or remove preflight: false",
    ),
    Incompatible(
        "pipeline.schedule: zero-bubble with compile",
        "zero-bubble-and-compile",
        lambda config, degrees: _zero_bubble(config, degrees) and bool(config.compile),
        "zero-bubble splits each backward in two, but a compiled backward cannot be split",
        "remove compile, or use pipeline.schedule: 1f1b",
    ),
    Incompatible(
        "pipeline.schedule: zero-bubble with recompute",
        "zero-bubble-and-recompute",
        lambda config, degrees: _zero_bubble(config, degrees) and config.recompute != "off",
        "zero-bubble splits each backward in two, and each half would recompute the block",
        'set recompute="off", or use pipeline.schedule: 1f1b',
    ),
    Incompatible(
        "adafactor or muon with sharded parameters",
        "optimizer-needs-whole-weights",
        lambda config, degrees: OPTIMIZERS.facts(config.optimizer.name).needs_full and not degrees.is_replicated,
        "these optimizers need full matrices, but each rank holds only a shard",
        'use adamw, adam or sgd, or strategy="ddp"',
    ),
    Incompatible(
        'a pipeline with compile="model"',
        "pipeline-and-compile",
        lambda config, degrees: degrees.pipeline > 1 and config.compile == "model",
        "no rank holds the full model",
        "set compile=True to compile each block",
    ),
    Incompatible(
        "channels_last with a pipeline",
        "channels-last-and-pipeline",
        lambda config, degrees: config.channels_last and degrees.pipeline > 1,
        "stages exchange contiguous tensors, so only the first one would compute channels last",
        'remove channels_last, or use strategy="ddp" or strategy="fsdp"',
    ),
    Incompatible(
        "deterministic: everywhere with a sharded or split model",
        "everywhere-and-layout",
        lambda config, degrees: config.fixed_order and _is_divided(config, degrees),
        "only where every rank holds the full model are all sums inside it computed in the same order",
        'use strategy="ddp", or deterministic: true, which gives the same bits on the same layout',
    ),
    Incompatible(
        'deterministic: everywhere with micro_batch="auto"',
        "everywhere-and-finder",
        lambda config, degrees: config.fixed_order and config.micro_batch == "auto",
        "a slice is a micro-batch, and its size must not depend on the memory of a machine",
        "remove micro_batch, and set slices to a number at which a slice fits in memory everywhere",
    ),
    Incompatible(
        "deterministic: everywhere with dropout: per-rank",
        "everywhere-and-dropout",
        lambda config, degrees: config.fixed_order and config.dropout == "per-rank",
        "each rank draws its own masks, so samples get other ones on another number of ranks",
        "remove dropout: per-rank",
    ),
    Incompatible(
        "deterministic: everywhere with compile",
        "everywhere-and-compile",
        lambda config, degrees: config.fixed_order and bool(config.compile),
        "kernels are compiled for the shapes that a rank has seen, which differ with the number of ranks",
        "remove compile",
    ),
    Incompatible(
        "sync.compress with a sharded or split model",
        "compress-and-layout",
        lambda config, degrees: _compresses(config) and _is_divided(config, degrees),
        "only DDP, where every rank holds the full model, reduces gradients with a hook that can compress them",
        'use strategy="ddp"; or, with FSDP, remove sync.compress and set fsdp.reduce_dtype: bf16',
    ),
    Incompatible(
        "sync.compress with deterministic: everywhere",
        "compress-and-everywhere",
        lambda config, degrees: _compresses(config) and config.fixed_order,
        "what compression loses depends on how a batch is distributed over ranks",
        "remove sync, or use deterministic: true, which gives the same bits on the same layout",
    ),
    Incompatible(
        "sync.compress with graph",
        "compress-and-graph",
        lambda config, degrees: _compresses(config) and config.graph,
        "only the step of a single GPU is captured, which reduces no gradients",
        "remove sync or graph",
    ),
    Incompatible(
        "sync.every with sync.compress: powersgd",
        "every-and-powersgd",
        lambda config, degrees: (
            config.sync is not None and config.sync.every is not None and config.sync.compress == "powersgd"
        ),
        "a round sends changes of weights, which are not approximated by matrices of a low rank",
        "use sync.compress: int8, bf16 or fp16",
    ),
    Incompatible(
        "graph with several ranks, with a sharded model or on several devices",
        "graph-and-layout",
        lambda config, degrees: config.graph and (degrees.world > 1 or _is_divided(config, degrees)),
        "only the step of a single GPU is captured, without communication and copies between devices",
        'remove graph, or train on one GPU with strategy="single"; compile works with every layout',
    ),
    Incompatible(
        "graph with deterministic: everywhere",
        "graph-and-everywhere",
        lambda config, degrees: config.graph and config.fixed_order,
        "slices are added up in a fixed order on the host",
        "use deterministic: true",
    ),
    Incompatible(
        'graph with micro_batch="auto"',
        "graph-and-finder",
        lambda config, degrees: config.graph and config.micro_batch == "auto",
        "sizes are tried without a graph, which needs memory of its own",
        "set micro_batch to a number",
    ),
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
