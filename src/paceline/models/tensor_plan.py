"""The tensor plan: a parallel style for each layer, declared as data.

    class GPT(nn.Module):
        model_spec = paceline.ModelSpec(tensor_plan={"tokens": "vocabulary", "blocks.*.up": "column", …})

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

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import LayoutError, did_you_mean
from paceline.models.spec import spec_of

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
            "no-tensor-plan",
            f"The layout has a tensor axis, but {type(model).__name__} declares no tensor plan.",
            why="whether a layer is sharded over its outputs or its inputs depends on what the model computes",
            fix='set tensor.plan: {"layers.0": column, "layers.2": row} in the recipe, or on the model, '
            'model_spec = paceline.ModelSpec(tensor_plan=…); or use strategy="fsdp"',
        )
    unknown = sorted(set(plan.values()) - set(STYLES))
    if unknown:
        raise LayoutError(
            "tensor-plan-word",
            f"The tensor plan of {type(model).__name__} uses unsupported styles: {', '.join(unknown)}.",
            fix='set tensor.plan (column, row, sequence, vocabulary), or use strategy="fsdp"',
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
                fix="use names from model.named_modules(); * matches one part of a name: blocks.*.up",
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
        is_leaf = not any(True for child in module.children() for _ in child.parameters())
        if is_leaf:
            return
        expected = "layers without submodules"
    else:
        if isinstance(module, classes) and getattr(module, "max_norm", None) is None:
            return
        expected = " or ".join(f"nn.{each.__name__}" for each in classes)
    raise LayoutError(
        "tensor-plan-kind",
        f"Tensor plan style {style!r} does not apply to {name}, a {type(module).__name__}.",
        why=f"{style} is for {expected}" + (" without max_norm" if style == "vocabulary" else ""),
        fix="list the layers inside it, or use another style: `paceline explain layout.tensor-plan-kind`",
    )
