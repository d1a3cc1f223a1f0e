"""Cutting a model into stages.

What can be cut is a row of layers: a model that declares its `parts`, or an `nn.Sequential`. The model object stays the
user's own. What other ranks hold is taken out of it, and the rest keeps its name (`blocks.3` stays `blocks.3`), so
state-dict names mean the same on every rank, and a model on the meta device is filled with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.models.spec import PipelineSpec
from paceline.parallel.shards import tied_parameters
from paceline.plan import pipeline_schedule as arithmetic


@dataclass(frozen=True)
class LayerSequence:
    """A model as layers one after the other. The first and last ones carry what `parts` puts around them."""

    container: str  # the name of the list of layers; "" is the model itself
    keys: tuple[str, ...]  # their names in it
    parts: PipelineSpec | None

    @property
    def names(self) -> list[str]:
        return [f"{self.container}.{key}" if self.container else key for key in self.keys]


@dataclass(frozen=True)
class TiedParameter:
    """A parameter with several names, held by more than one rank: each has a copy, and all stay equal."""

    names: tuple[str, ...]
    holders: dict[int, str]  # rank on the pipeline axis → the name of its copy; the first holds the original


@dataclass(frozen=True)
class StagePartition:
    """Which layers go to which stage. Stage s lies on rank s % ranks, so the last one is on the last rank."""

    row: LayerSequence
    stages: tuple[tuple[str, ...], ...]  # keys of the layers of each
    ranks: int
    shared: tuple[TiedParameter, ...] = field(default=())

    def of_rank(self, rank: int) -> list[int]:
        return list(range(rank, len(self.stages), self.ranks))

    def __str__(self) -> str:
        return ", ".join(f"{len(keys)} on rank {number % self.ranks}" for number, keys in enumerate(self.stages))


class Stage(nn.Module):
    """From what the stage before sends to what the next one gets. Its layers are the model's own."""

    def __init__(
        self, model: nn.Module, row: LayerSequence, keys: Sequence[str], *, first: bool, last: bool, context: Any = None
    ) -> None:
        super().__init__()
        self.blocks = _layers(model, row, keys)
        self.is_first, self.is_last = first, last
        parts = row.parts
        self._before = getattr(model, parts.first) if parts and first else None
        self._after = getattr(model, parts.last) if parts and last else None
        self._context: AbstractContextManager[Any] | None = context
        for key, block in zip(keys, self.blocks, strict=True):
            self.add_module(f"layer {key}", block)  # sharding looks for parameters in children
        for name in (*(parts.of_first if parts and first else ()), *(parts.of_last if parts and last else ())):
            self.add_module(name.replace(".", " "), model.get_submodule(name))

    def forward(self, hidden: Tensor) -> Any:
        if not self.is_first and hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(Tensor.contiguous)  # what is sent has to be
        with self._context or nullcontext():
            if self._before is not None:
                hidden = self._before(hidden)
            for block in self.blocks:
                hidden = block(hidden)
            if self._after is not None:
                hidden = self._after(hidden)
        return hidden if self.is_last else _to_send(hidden)


def _to_send(hidden: Any) -> Tensor:
    if isinstance(hidden, DTensor):
        hidden = hidden.to_local()
    if not isinstance(hidden, Tensor):
        raise LayoutError(
            "stage-output",
            f"A layer at the end of a stage returns a {type(hidden).__name__}.",
            why="one tensor goes from stage to stage",
            fix="cut elsewhere (pipeline.balance), or let the layer return a tensor",
        )
    return hidden.contiguous()


def row_of(model: nn.Module) -> LayerSequence:
    """The model as a row; a model that is none is refused."""
    parts = getattr(model, "parts", None)
    if isinstance(parts, PipelineSpec):
        found = LayerSequence(parts.blocks, tuple(model.get_submodule(parts.blocks)._modules), parts)
        _require_all_known(model, parts)
    elif isinstance(model, nn.Sequential):
        found = LayerSequence("", tuple(model._modules), None)
    else:
        raise LayoutError(
            "no-parts",
            f"The model {type(model).__name__} can't be cut into stages.",
            why="a pipeline needs a row of layers: an nn.Sequential (with a criterion), or a model that says its parts",
            fix="give the class a `parts = paceline.models.spec.PipelineSpec(…)`, or use strategy: fsdp",
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise LayoutError(
                "pipeline-and-batchnorm",
                f"{name} is a batch norm, which can't run in a pipeline.",
                why="micro-batches are padded to one length, and the padding would enter its statistics",
                fix="use a GroupNorm or LayerNorm; or strategy: ddp or fsdp",
            )
    return found


def _require_all_known(model: nn.Module, parts: PipelineSpec) -> None:
    known = (*parts.of_first, *parts.of_last, parts.blocks)
    lost = [
        name for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(name.startswith(f"{part}.") for part in known)
    ]  # fmt: skip
    if lost:
        raise LayoutError(
            "no-parts",
            f"{', '.join(lost[:4])} is in none of the parts that {type(model).__name__} declares.",
            why="no stage would hold it",
            fix="name its module in of_first or of_last of `parts`",
        )


def plan(model: nn.Module, settings: PipelineSection, ranks: int) -> StagePartition:
    """Where to cut, from the whole model; nothing is changed yet."""
    arithmetic.require_runnable(settings, ranks)
    row, count = row_of(model), ranks * arithmetic.stages_a_rank(settings)
    layers = _layers(model, row, row.keys)
    if settings.balance is not None:
        lengths = arithmetic.explicit_partition(settings.balance, row.names, count)
        units = [1] * len(layers)
    else:
        units = _with_weights(layers)
        lengths = arithmetic.balanced_partition(_costs(model, row, layers, units, settings.cost), count)
    stages, layer, unit = [], 0, 0
    for length in lengths:
        size = sum(units[unit : unit + length])
        stages.append(row.keys[layer : layer + size])
        layer, unit = layer + size, unit + length
        if not any(map(_weighs, layers[layer - size : layer])):
            arithmetic.require_enough(sum(map(_weighs, layers)), count)
            raise LayoutError(
                "balance",
                f"The stage of {', '.join(stages[-1])} has no weights.",
                why="every stage needs a layer with weights",
                fix="set pipeline.balance to other layers, or leave it out",
            )
    cutting = StagePartition(row, tuple(stages), ranks)
    return StagePartition(row, cutting.stages, ranks, tuple(_shared(model, cutting)))


def _with_weights(layers: Sequence[nn.Module]) -> list[int]:
    """Lengths of runs that stay together: a layer with weights and those without that follow it. Those at the very
    beginning (a Flatten) go with the first that has some."""
    units, seen = [0], False
    for layer in layers:
        weighs = _weighs(layer)
        if weighs and seen:
            units.append(0)
        seen |= weighs
        units[-1] += 1
    return units


def _weighs(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def _costs(
    model: nn.Module, row: LayerSequence, layers: Sequence[nn.Module], units: Sequence[int], cost: str
) -> list[float]:
    each = [_cost(layer, cost) for layer in layers]
    sums, start = [], 0
    for length in units:
        sums.append(sum(each[start : start + length]))
        start += length
    if row.parts is not None:
        sums[0] += sum(_cost(model.get_submodule(name), cost) for name in row.parts.of_first)
        sums[-1] += sum(_cost(model.get_submodule(name), cost) for name in row.parts.of_last)
    return sums


def _cost(module: nn.Module, cost: str) -> float:
    """Bytes of parameters; or, for time, the multiplications of a row: a weight each, but a lookup multiplies
    nothing."""
    if cost == "memory":
        return float(sum(p.numel() * p.element_size() for p in module.parameters()))
    return float(
        sum(
            parameter.numel()
            for part in module.modules()
            if not isinstance(part, nn.Embedding)
            for parameter in part.parameters(recurse=False)
        )
    )


def _shared(model: nn.Module, cutting: StagePartition) -> list[TiedParameter]:
    found = []
    for names in tied_parameters(model):
        holders: dict[int, str] = {}
        for name in names:
            holders.setdefault(_rank_of(name, cutting), name)
        if len(holders) > 1:
            found.append(TiedParameter(tuple(names), holders))
    return found


def _rank_of(name: str, cutting: StagePartition) -> int:
    """The rank that holds a parameter."""
    row = cutting.row
    if row.parts is not None:
        if any(name.startswith(f"{part}.") for part in row.parts.of_first):
            return 0
        if any(name.startswith(f"{part}.") for part in row.parts.of_last):
            return cutting.ranks - 1
    key = name.removeprefix(f"{row.container}.").partition(".")[0]
    return next(number for number, keys in enumerate(cutting.stages) if key in keys) % cutting.ranks


def take(model: nn.Module, cutting: StagePartition, rank: int) -> None:
    """Leave in the model only what this rank holds."""
    row = cutting.row
    kept = {key for number in cutting.of_rank(rank) for key in cutting.stages[number]}
    layers = _container(model, row)
    for key in row.keys:
        if key not in kept:
            del layers._modules[key]
    if row.parts is not None:
        used = {*(row.parts.of_first if rank == 0 else ()), *(row.parts.of_last if rank == cutting.ranks - 1 else ())}
        for name in {*row.parts.of_first, *row.parts.of_last} - used:
            parent, _, attribute = name.rpartition(".")
            model.get_submodule(parent)._modules[attribute] = None


def stages_of(model: nn.Module, cutting: StagePartition, rank: int, context: Any = None) -> list[Stage]:
    """This rank's stages, made of the layers as they are now."""
    last = len(cutting.stages) - 1
    return [
        Stage(model, cutting.row, cutting.stages[number], first=number == 0, last=number == last, context=context)
        for number in cutting.of_rank(rank)
    ]


def _container(model: nn.Module, row: LayerSequence) -> nn.Module:
    return model.get_submodule(row.container)


def _layers(model: nn.Module, row: LayerSequence, keys: Sequence[str]) -> list[nn.Module]:
    modules = _container(model, row)._modules
    return [module for key in keys if (module := modules[key]) is not None]
