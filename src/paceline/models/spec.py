"""What a model declares about its structure, as data.

    class GPT(nn.Module):
        model_spec = paceline.ModelSpec(
            tensor_plan={"tokens": "vocabulary", "blocks.*.up": "column", "blocks.*.down": "row", "norm": "sequence"},
            pipeline=paceline.PipelineSpec(
                first="embed", blocks="blocks", last="read_out", loss="loss",
                first_modules=("tokens", "positions"), last_modules=("norm", "head"),
            ),
        )

`model_spec` is a class attribute, or an attribute of the instance if it depends on the arguments of `__init__`. For a
model without one, the attributes of Hugging Face models are read (`huggingface.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from paceline.models import huggingface


@dataclass(frozen=True)
class PipelineSpec:
    """How a model is partitioned into stages. `forward` must consist of first, all blocks, last and loss.

    Args:
        first: method that maps the inputs of a batch to hidden states
        blocks: name of an nn.ModuleList of layers that map hidden states to hidden states
        last: method that maps hidden states to outputs
        loss: method that maps outputs and targets to the loss
        first_modules: modules that `first` uses
        last_modules: modules that `last` uses
        targets: key of the targets in a batch

    Example:
        >>> import paceline
        >>> spec = paceline.PipelineSpec(
        ...     first="embed", blocks="layers", last="read_out", loss="loss", first_modules=("embedding",)
        ... )
        >>> spec.targets
        'targets'
    """

    first: str
    blocks: str
    last: str
    loss: str
    first_modules: tuple[str, ...] = ()
    last_modules: tuple[str, ...] = ()
    targets: str = "targets"


@dataclass(frozen=True)
class ModelSpec:
    """What a model declares about its structure, in its attribute `model_spec`. Settings of the recipe take precedence.

    Args:
        blocks: names or patterns of the repeated layers; default: detected
        tensor_plan: styles of tensor parallelism by name or pattern of a module: `"column"`, `"row"`, `"vocabulary"`,
            `"sequence"`
        pipeline: how the model is partitioned into stages
        heads: names and numbers that the tensor degree must divide, such as attention heads
        deferred_init: whether `reset_parameters()` sets every value, so that the meta device can be used
        compile_methods: methods that `compile: true` compiles in addition to blocks

    Example:
        >>> import paceline
        >>> from torch import nn
        >>> class Net(nn.Module):
        ...     model_spec = paceline.ModelSpec(blocks=("layers.*",), tensor_plan={"layers.*.up": "column"})
        >>> Net.model_spec.blocks
        ('layers.*',)
    """

    blocks: tuple[str, ...] | None = None
    tensor_plan: Mapping[str, str] | None = None
    pipeline: PipelineSpec | None = None
    heads: Mapping[str, int] = field(default_factory=dict)
    deferred_init: bool = False
    compile_methods: tuple[str, ...] = ()


@runtime_checkable
class DeclaresSpec(Protocol):
    model_spec: ModelSpec


def declared_spec(owner: object) -> ModelSpec | None:
    """The spec declared by a model or by a function that builds one."""
    if isinstance(owner, DeclaresSpec) and isinstance(owner.model_spec, ModelSpec):
        return owner.model_spec
    return None


def spec_of(model: nn.Module) -> ModelSpec:
    """The declared spec, otherwise that of a Hugging Face model, otherwise an empty one."""
    return declared_spec(model) or ModelSpec(
        blocks=huggingface.block_names(model) or None,
        tensor_plan=huggingface.tensor_plan(model) or None,
        heads=huggingface.attention_heads(model),
    )
