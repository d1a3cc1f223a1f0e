"""The size of a model and its possible partitions, from which `plan/memory.py` derives a layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.models.blocks import find_blocks
from paceline.models.spec import spec_of
from paceline.plan.memory import ModelSize


def size_of(model: nn.Module, blocks: Sequence[str] | None = None, degrees: Sequence[int] = ()) -> ModelSize:
    """`degrees` are the tensor degrees that the model supports. Tied parameters count once."""
    found = [module for _, module in find_blocks(model, blocks)]
    inside = {id(parameter) for block in found for parameter in block.parameters()}
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in found]
    return ModelSize(
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        largest_block=max([rest, *of_blocks]),
        tensor_degrees=tuple(degrees),
        stages=len(found) if isinstance(model, nn.Sequential) or spec_of(model).pipeline is not None else 1,
    )
