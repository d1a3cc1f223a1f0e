"""What a model declares, as data, for the passes that change it.

    class GPT(nn.Module):
        model_spec = paceline.ModelSpec(
            tensor_plan={"tokens": "vocabulary", "blocks.*.up": "column", "blocks.*.down": "row", "norm": "sequence"},
            pipeline=paceline.PipelineSpec(
                first="embed", blocks="blocks", last="read_out", loss="loss",
                first_modules=("tokens", "positions"), last_modules=("norm", "head"),
            ),
        )

A class attribute, or an attribute of the instance where it depends on the arguments of `__init__`. For a model that
declares none, what Hugging Face models declare is read instead (`huggingface.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from paceline.models import huggingface


@dataclass(frozen=True)
class PipelineSpec:
    """How a model is partitioned into stages: forward must be first, every block, last, loss, and nothing else."""

    first: str  # method: from the batch's inputs to hidden values
    blocks: str  # name of an nn.ModuleList whose members map hidden values to hidden values
    last: str  # method: from hidden values to outputs
    loss: str  # method: from outputs and targets to the loss
    first_modules: tuple[str, ...] = ()  # modules that `first` uses
    last_modules: tuple[str, ...] = ()  # modules that `last` uses
    targets: str = "targets"  # name of the batch's entry that the loss is computed from


@dataclass(frozen=True)
class ModelSpec:
    """What a model declares about itself; a recipe's own settings take precedence."""

    blocks: tuple[str, ...] | None = None  # names or patterns of the repeated layers; None: they are found
    tensor_plan: Mapping[str, str] | None = None  # names or patterns → words of `tensor_plan.py`
    pipeline: PipelineSpec | None = None
    heads: Mapping[str, int] = field(default_factory=dict)  # numbers that the tensor degree must divide, by name
    deferred_init: bool = False  # reset_parameters() sets every value, so the model may be built on the meta device
    compile_methods: tuple[str, ...] = ()  # methods that `compile: true` compiles beside the blocks


@runtime_checkable
class DeclaresSpec(Protocol):
    model_spec: ModelSpec


def declared_spec(owner: object) -> ModelSpec | None:
    """The spec that a model, or a function that builds one, declares itself."""
    if isinstance(owner, DeclaresSpec) and isinstance(owner.model_spec, ModelSpec):
        return owner.model_spec
    return None


def spec_of(model: nn.Module) -> ModelSpec:
    """The declared spec, else Hugging Face's, else an empty one."""
    return declared_spec(model) or ModelSpec(
        blocks=huggingface.block_names(model) or None,
        tensor_plan=huggingface.tensor_plan(model) or None,
        heads=huggingface.attention_heads(model),
    )
