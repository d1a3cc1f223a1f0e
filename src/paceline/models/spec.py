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

The blocks of a model are its repeated layers: the unit of sharding, activation checkpointing and compilation. A recipe
lists them, or the model declares them (`ModelSpec.blocks`, `_no_split_modules` of Hugging Face), or they are detected:
the most frequent class in the module lists of the model.

The tensor plan declares a parallel style for each layer:

| style      | module       | each rank holds                | and computes                                          |
|------------|--------------|--------------------------------|-------------------------------------------------------|
| column     | nn.Linear    | some of the outputs            | these outputs, from the full inputs                   |
| row        | nn.Linear    | some of the inputs             | a partial sum over its inputs, which is reduced       |
| vocabulary | nn.Embedding | some of the tokens             | the embeddings of these tokens, which are reduced     |
|            | nn.Linear    | some of the outputs            | these logits, which stay sharded (`losses.py`)        |
| sequence   | any module   | all parameters                 | its slice of the tokens                               |

`*` matches one part of a name. The numbers in `ModelSpec.heads` must be divisible by the tensor degree. The plans of
Hugging Face models are translated (`huggingface.py`, which also explains `gathered` and `summed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import nn

from paceline.errors import LayoutError, did_you_mean
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
        class_dim: the dim of logits that has the classes, 1 or -1, for metrics by name; default: found by shapes

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
    class_dim: int | None = None


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


Named = tuple[str, nn.Module]


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> list[Named]:
    """Names and modules of the blocks, in the order of the model. Blocks are never nested."""
    if patterns is not None:
        return _matching(model, patterns)
    declared = spec_of(model).blocks
    return _matching(model, declared) if declared else _outermost(_most_frequent(model))


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[Named]:
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(
                "no-such-block",
                f"blocks: no module of {type(model).__name__} matches {pattern!r}; "
                f"{did_you_mean(pattern, [name for name in modules if name])}",
            )
        found |= {name: modules[name] for name in names}
    return _outermost([(name, module) for name, module in modules.items() if name in found])


def _most_frequent(model: nn.Module) -> list[Named]:
    """The most frequent class in module lists. Modules with submodules are preferred to plain layers."""
    composite: dict[type, list[Named]] = defaultdict(list)
    plain: dict[type, list[Named]] = defaultdict(list)
    for name, parent in model.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            for key, child in parent.named_children():
                if any(True for _ in child.parameters()) and not isinstance(child, (nn.ModuleList, nn.Sequential)):
                    classes = composite if any(True for _ in child.children()) else plain
                    classes[type(child)].append((f"{name}.{key}" if name else key, child))
    for classes in (composite, plain):
        most = max(classes.values(), key=len, default=[])
        if len(most) > 1:
            return most
    return []


def _outermost(found: list[Named]) -> list[Named]:
    names = {name for name, _ in found}

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in names for length in range(1, len(parts)))

    return [(name, module) for name, module in found if not is_inside(name)]


STYLES = ("column", "row", "vocabulary", "sequence", "gathered", "summed")
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "gathered": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
}


def plan_of(model: nn.Module, override: Mapping[str, str] | None) -> Mapping[str, str]:
    """The tensor plan of the recipe, otherwise that of the model."""
    plan = override if override is not None else spec_of(model).tensor_plan
    if not plan:
        raise LayoutError(
            "no-tensor-plan", f"The layout has a tensor axis, but {type(model).__name__} declares no tensor plan."
        )
    unknown = sorted(set(plan.values()) - set(STYLES))
    if unknown:
        raise LayoutError(
            "tensor-plan-word",
            f"The tensor plan of {type(model).__name__} uses unsupported styles: {', '.join(unknown)}.",
        )
    return plan


def styles_of_modules(model: nn.Module, plan: Mapping[str, str], *, full: bool = True) -> dict[str, str]:
    """The style of each module by name. In a `full` model (not one pipeline stage), every pattern must match."""
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        names = [name for name in modules if _matches(name, pattern)]
        if not names and full:
            raise LayoutError(
                "no-such-module",
                f"tensor plan: no module of {type(model).__name__} matches {pattern!r}; "
                f"{did_you_mean(pattern, modules)}",
            )
        for name in names:
            _require_applicable(name, modules[name], style)
        found |= dict.fromkeys(names, style)
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, expected = name.split("."), pattern.split(".")
    return len(parts) == len(expected) and all(map(fnmatchcase, parts, expected))


def _require_applicable(name: str, module: nn.Module, style: str) -> None:
    classes = _MODULES.get(style)
    if classes is None:
        fits = not any(True for child in module.children() for _ in child.parameters())
        expected = "layers without submodules"
    else:
        fits = isinstance(module, classes) and getattr(module, "max_norm", None) is None
        expected = " or ".join(f"nn.{each.__name__}" for each in classes)
    if fits:
        return
    raise LayoutError(
        "tensor-plan-kind",
        f"Tensor plan style {style!r} does not apply to {name}, a {type(module).__name__}.",
        why=f"{style} is for {expected}" + (" without max_norm" if style == "vocabulary" else ""),
    )
