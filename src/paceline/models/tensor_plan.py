"""How a model's layers are sharded over the ranks of the tensor axis: a word for each, declared as data.

    class GPT(nn.Module):
        model_spec = paceline.ModelSpec(tensor_plan={"tokens": "vocabulary", "blocks.*.up": "column", …})

| word       | of           | each rank holds                | and computes                                          |
|------------|--------------|--------------------------------|-------------------------------------------------------|
| column     | nn.Linear    | some of the outputs            | those outputs, of full inputs                         |
| row        | nn.Linear    | some of the inputs             | its partial sum over inputs; these are reduced        |
| vocabulary | nn.Embedding | some of the tokens             | those tokens' values; these are reduced               |
|            | nn.Linear    | some of the outputs            | those logits, which stay sharded: `models/losses.py`  |
| sequence   | any module   | all of it                      | its slice of the tokens                               |

`*` stands for one part of a name. The numbers in `ModelSpec.heads` must be divisible by the degree. A Hugging Face
model's plan is understood in its own words (`huggingface.py`, which also says what `gathered` and `summed` are).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import LayoutError, did_you_mean
from paceline.models.spec import spec_of

WORDS = ("column", "row", "vocabulary", "sequence", "gathered", "summed")
_FITTING: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "gathered": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
}


def plan_of(model: nn.Module, given: Mapping[str, str] | None) -> Mapping[str, str]:
    """Names with their words: the recipe's, or the model's."""
    plan = given if given is not None else spec_of(model).tensor_plan
    if not plan:
        raise LayoutError(
            "no-tensor-plan",
            f"The layout has a tensor axis, but {type(model).__name__} does not say how its layers are cut.",
            why="which layers are cut by outputs and which by inputs follows from what the model computes",
            fix='say it: tensor.plan: {"layers.0": column, "layers.2": row} in the recipe, or in the model, '
            "model_spec = paceline.ModelSpec(tensor_plan=…); or use strategy: fsdp",
        )
    unknown = sorted(set(plan.values()) - set(WORDS))
    if unknown:
        raise LayoutError(
            "tensor-plan-word",
            f"{type(model).__name__}'s own tensor plan says {', '.join(unknown)}, which is not understood here.",
            fix="give a plan of your own in tensor.plan (column, row, sequence, vocabulary), or use strategy: fsdp",
        )
    return plan


def words_of_modules(model: nn.Module, plan: Mapping[str, str], *, full: bool = True) -> dict[str, str]:
    """The word for each module by its full name. Of a `full` model (not one stage of it), every name must exist."""
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        names = [name for name in modules if _matches(name, pattern)]
        if not names and full:
            raise LayoutError(
                "no-such-module",
                f"The tensor plan names {pattern!r}, but the model {type(model).__name__} has no such module: "
                f"{did_you_mean(pattern, modules)}",
                fix="use names of model.named_modules(); * stands for one part of a name: blocks.*.up",
            )
        for name in names:
            _require_fitting(name, modules[name], word)
        found |= dict.fromkeys(names, word)
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _require_fitting(name: str, module: nn.Module, word: str) -> None:
    kinds = _FITTING.get(word)
    if kinds is None:
        is_leaf = not any(True for child in module.children() for _ in child.parameters())
        if is_leaf:
            return
        expected = "a layer that is not made of others"
    else:
        if isinstance(module, kinds) and getattr(module, "max_norm", None) is None:
            return
        expected = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
    raise LayoutError(
        "tensor-plan-kind",
        f"The tensor plan says {word!r} of {name}, which is a {type(module).__name__}.",
        why=f"{word} is for {expected}" + (" without max_norm" if word == "vocabulary" else ""),
        fix="name the layers inside it, or another word; `paceline explain layout.tensor-plan-kind` has them all",
    )
