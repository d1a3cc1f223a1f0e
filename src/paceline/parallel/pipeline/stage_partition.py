"""Partitions a model into the stages of a pipeline.

The model must be a sequence of layers: it declares a `PipelineSpec`, or is an `nn.Sequential`. It is modified in place:
layers of other ranks are removed, and the others keep their names (`blocks.3` stays `blocks.3`), so state_dict keys are
consistent across ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.models.spec import PipelineSpec, find_blocks, spec_of
from paceline.parallel.meta_init import is_meta
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.parallel.shards import tied_parameters
from paceline.plan.partition import balanced_partition, parse_balance, require_enough, require_runnable, stages_per_rank


@dataclass(frozen=True)
class LayerSequence:
    """A model as consecutive layers. The first and last stages also hold `first_modules` and `last_modules`."""

    container: str  # name of the module that contains the layers; "" is the model itself
    keys: tuple[str, ...]  # their names in the container
    spec: PipelineSpec | None
    first_modules: tuple[str, ...] = ()
    last_modules: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [f"{self.container}.{key}" if self.container else key for key in self.keys]

    def layers(self, model: nn.Module, keys: Sequence[str]) -> list[nn.Module]:
        modules = model.get_submodule(self.container)._modules
        return [module for key in keys if (module := modules[key]) is not None]


@dataclass(frozen=True)
class TiedParameter:
    """A tied parameter that several ranks hold. Each has a copy, and all copies are kept equal."""

    names: tuple[str, ...]
    holders: dict[int, str]  # pipeline rank → name of its copy; the first holds the original


@dataclass(frozen=True)
class StagePartition:
    """The layers of each stage. Stage s is on rank s % ranks, so the last stage is on the last rank."""

    sequence: LayerSequence
    stages: tuple[tuple[str, ...], ...]  # keys of the layers of each stage
    ranks: int
    tied: tuple[TiedParameter, ...] = ()

    def stages_on(self, rank: int) -> list[int]:
        return list(range(rank, len(self.stages), self.ranks))

    def last_block_before(self, stage: int, blocks: Sequence[str]) -> str | None:
        """The last of `blocks` that is a layer, or in a layer, of an earlier stage."""
        count = sum(len(keys) for keys in self.stages[:stage])
        for layer in reversed(self.sequence.names[:count]):
            for block in reversed(blocks):
                if f"{block}.".startswith(f"{layer}."):
                    return block
        return None

    def copies_on(self, rank: int) -> dict[str, str]:
        """Maps each copy on this rank of a parameter of another rank to the name of the original."""
        return {
            tied.holders[rank]: next(iter(tied.holders.values()))
            for tied in self.tied
            if rank in list(tied.holders)[1:]
        }

    def aliases_on(self, rank: int) -> dict[str, str]:
        """Maps every name of a tied parameter on this rank to its name on this rank."""
        return {name: tied.holders[rank] for tied in self.tied if rank in tied.holders for name in tied.names}

    def __str__(self) -> str:
        return ", ".join(f"{len(keys)} on rank {number % self.ranks}" for number, keys in enumerate(self.stages))


def layer_sequence(model: nn.Module) -> LayerSequence:
    """The model as a sequence of layers. Raises LayoutError if it is not one."""
    spec = spec_of(model).pipeline
    if spec is not None:
        keys = tuple(model.get_submodule(spec.blocks)._modules)
        found = LayerSequence(spec.blocks, keys, spec, spec.first_modules, spec.last_modules)
        _require_all_named(model, found)
    elif isinstance(model, nn.Sequential):
        found = LayerSequence("", tuple(model._modules), None)
    else:
        raise LayoutError(
            "no-pipeline-spec",
            f"{type(model).__name__} can't be partitioned into pipeline stages.",
            why="a pipeline needs a sequence of layers: an nn.Sequential (with a criterion) or a PipelineSpec",
            fix="set model_spec = paceline.ModelSpec(pipeline=paceline.PipelineSpec(…)) on the class, or use "
            'strategy="fsdp"',
        )
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and (isinstance(module, _BatchNorm) or module.track_running_stats):
            raise LayoutError(
                "pipeline-and-batchnorm", f"Pipelines do not support batch norm, or running statistics: {name}."
            )
    return found


def _require_all_named(model: nn.Module, sequence: LayerSequence) -> None:
    known = (*sequence.first_modules, *sequence.last_modules, sequence.container)
    missing = [
        name for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(name.startswith(f"{part}.") for part in known)
    ]  # fmt: skip
    if missing:
        raise LayoutError(
            "no-pipeline-spec",
            f"Parameters missing from the PipelineSpec of {type(model).__name__}: {', '.join(missing[:4])}.",
            why="no stage would hold them",
            fix="add their modules to first_modules or last_modules",
        )


def partition_model(model: nn.Module, settings: PipelineSection, ranks: int) -> StagePartition:
    """Compute the partition of a full model, without modifying it."""
    require_runnable(settings, ranks)
    sequence, count = layer_sequence(model), ranks * stages_per_rank(settings)
    layers = sequence.layers(model, sequence.keys)
    if settings.balance is not None:
        lengths = parse_balance(settings.balance, sequence.names, count, is_pipeline=True)
        units = [1] * len(layers)
    else:
        units = _units(layers)
        require_enough(len(units), count)
        lengths = balanced_partition(_costs(model, sequence, layers, units, settings.cost), count)
    stages, layer, unit = [], 0, 0
    for length in lengths:
        size = sum(units[unit : unit + length])
        stages.append(sequence.keys[layer : layer + size])
        layer, unit = layer + size, unit + length
        if not any(map(_has_weights, layers[layer - size : layer])):
            require_enough(sum(map(_has_weights, layers)), count)
            raise LayoutError(
                "balance",
                f"The stage with {', '.join(stages[-1])} has no parameters.",
                why="every stage needs a layer with parameters",
                fix="change pipeline.balance, or remove it",
            )
    partition = StagePartition(sequence, tuple(stages), ranks)
    return replace(partition, tied=tuple(_tied(model, partition)))


def _units(layers: Sequence[nn.Module]) -> list[int]:
    """Sizes of groups that stay in one stage: a layer with parameters and the following ones without. Leading layers
    without parameters (a Flatten) belong to the first group."""
    units, seen = [0], False
    for layer in layers:
        has_weights = _has_weights(layer)
        if has_weights and seen:
            units.append(0)
        seen |= has_weights
        units[-1] += 1
    return units


def _has_weights(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def _costs(
    model: nn.Module, sequence: LayerSequence, layers: Sequence[nn.Module], units: Sequence[int], cost: str
) -> list[float]:
    each = [_cost(layer, cost) for layer in layers]
    sums, start = [], 0
    for length in units:
        sums.append(sum(each[start : start + length]))
        start += length
    if sequence.spec is not None:
        sums[0] += sum(_cost(model.get_submodule(name), cost) for name in sequence.first_modules)
        sums[-1] += sum(_cost(model.get_submodule(name), cost) for name in sequence.last_modules)
    return sums


def _cost(module: nn.Module, cost: str) -> float:
    """Parameter bytes; or, for time, multiplications per sample: one per parameter, none for embeddings."""
    if cost == "memory":
        return float(sum(p.numel() * p.element_size() for p in module.parameters()))
    parts = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
    return float(sum(parameter.numel() for part in parts for parameter in part.parameters(recurse=False)))


def _tied(model: nn.Module, partition: StagePartition) -> list[TiedParameter]:
    found = []
    for names in tied_parameters(model):
        holders: dict[int, str] = {}
        for name in names:
            holders.setdefault(_rank_of(name, partition), name)
        if len(holders) > 1:
            found.append(TiedParameter(tuple(names), holders))
    return found


def _rank_of(name: str, partition: StagePartition) -> int:
    """The pipeline rank that holds a parameter."""
    sequence = partition.sequence
    if any(name.startswith(f"{part}.") for part in sequence.first_modules):
        return 0
    if any(name.startswith(f"{part}.") for part in sequence.last_modules):
        return partition.ranks - 1
    key = name.removeprefix(f"{sequence.container}.").partition(".")[0]
    return next(number for number, keys in enumerate(partition.stages) if key in keys) % partition.ranks


class _AbsentLayerError(LayoutError, AttributeError):
    """Also an AttributeError, so that hasattr() is False for the attributes of an absent layer."""


class AbsentLayer(nn.Module):
    """Stands for a layer of another pipeline rank. Has no parameters; using it is an error."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self._place = (name, rank)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise self._misuse("was called")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_place" not in self.__dict__:
            raise AttributeError(name)
        error = self._misuse(f"was asked for {name!r}")
        raise _AbsentLayerError("absent-layer", error.what, why=error.why, fix=error.fix)

    def _misuse(self, what: str) -> LayoutError:
        name, rank = self._place
        return LayoutError("absent-layer", f"Layer {name} {what}, but it is on pipeline rank {rank}.")


def apply_pipeline(parts: ModelParts, context: PassContext) -> str:
    """Remove the stages of other ranks."""
    model, mesh, partition, rank = parts.model, context.mesh, context.partition, context.mesh.coords["pipeline"]
    assert partition is not None
    blocks = [name for name, _ in find_blocks(model, parts.blocks)]
    remove_other_stages(model, partition, rank)
    here = {name for name, module in model.named_modules() if not isinstance(module, AbsentLayer)}
    # Blocks must be found before: on this rank, the list of layers may have a single member left.
    parts.blocks = [name for name in blocks if name in here] if blocks else None
    parts.tied_copies, parts.aliases = partition.copies_on(rank), partition.aliases_on(rank)
    if not is_meta(model) and mesh.data_ranks == mesh.local_replicas and not context.config.fsdp.offload:
        model.to(mesh.device)  # otherwise FSDP moves it, block by block
    return f"pipeline: {len(partition.stages)} stages, layers: {partition}"


def remove_other_stages(model: nn.Module, partition: StagePartition, rank: int) -> None:
    """Remove the modules of other ranks from the model. Layers keep their indices: `model[3]` is layer 3 or absent."""
    sequence = partition.sequence
    kept = {key for number in partition.stages_on(rank) for key in partition.stages[number]}
    layers = model.get_submodule(sequence.container)
    places = {key: number % partition.ranks for number, keys in enumerate(partition.stages) for key in keys}
    for key, name in zip(sequence.keys, sequence.names, strict=True):
        if key not in kept:
            layers._modules[key] = AbsentLayer(name, places[key])
    used = set(sequence.first_modules if rank == 0 else ())
    used |= set(sequence.last_modules if rank == partition.ranks - 1 else ())
    for name in {*sequence.first_modules, *sequence.last_modules} - used:
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent)._modules[attribute] = None
