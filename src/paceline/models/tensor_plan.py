"""How a model says, as data, how its layers are cut over the ranks of the tensor axis.

    class GPT(nn.Module):
        tensor_plan = {"tokens": "vocabulary", "blocks.*.up": "column", "blocks.*.down": "row", "norm": "sequence"}

| word       | of           | each rank holds                | and computes                                          |
|------------|--------------|--------------------------------|-------------------------------------------------------|
| column     | nn.Linear    | some of the outputs            | those outputs, of whole inputs                        |
| row        | nn.Linear    | some of the inputs             | a part of the sum over inputs; the parts are added    |
| vocabulary | nn.Embedding | some of the tokens             | those tokens' values; the parts are added             |
|            | nn.Linear    | some of the outputs            | those logits, which stay cut: `models/cross_entropy`  |
| sequence   | any module   | all of it                      | its share of the tokens                               |

`*` stands for one part of a name. The model's `heads` attribute, where it has one, has to be divisible by the degree.
A Hugging Face model's plan is understood in its own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from paceline.errors import LayoutError, did_you_mean

# `gathered` is a column layer whose outputs are put together again; the parameters of a `summed` module are whole, and
# each rank uses them on other heads: neither is needed in a plan of one's own.
_HUGGING_FACE = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "summed",
}
_FITTING: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "gathered": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
}


def plan_of(model: nn.Module, given: Mapping[str, str] | None) -> Mapping[str, str]:
    """Names with their words: the recipe's, or the model's."""
    plan = given if given is not None else getattr(model, "tensor_plan", None) or _hugging_face(model)
    if not plan:
        raise LayoutError(
            "no-tensor-plan",
            f"The layout has a tensor axis, but {type(model).__name__} does not say how its layers are cut.",
            why="which layers are cut by outputs and which by inputs follows from what the model computes",
            fix='say it: tensor.plan: {"layers.0": column, "layers.2": row} in the recipe, or a tensor_plan attribute '
            "of the model; or use strategy: fsdp",
        )
    return plan


def _hugging_face(model: nn.Module) -> dict[str, str]:
    config: Any = getattr(model, "config", None)
    of_base: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not of_base:
        return {}
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    words = {f"{prefix}{name}": word for name, word in of_base.items()} | (getattr(model, "_tp_plan", None) or {})
    unknown = sorted(set(words.values()) - set(_HUGGING_FACE))
    if unknown:
        raise LayoutError(
            "tensor-plan-word",
            f"{type(model).__name__}'s own tensor plan says {', '.join(unknown)}, which is not understood here.",
            fix="give a plan of your own in tensor.plan (column, row, sequence, vocabulary), or use strategy: fsdp",
        )
    return {name: _HUGGING_FACE[word] for name, word in words.items()}


def words_of_modules(model: nn.Module, plan: Mapping[str, str], *, whole: bool = True) -> dict[str, str]:
    """The word for each module by its full name. Of a model that is `whole`, every name in the plan has to be there."""
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        names = [name for name in modules if _matches(name, pattern)]
        if not names and whole:
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


def heads_of(model: nn.Module) -> dict[str, int]:
    """How many attention heads a model says it has, by what it calls them."""
    config: Any = getattr(model, "config", None)
    found = {"heads": getattr(model, "heads", None)}
    found |= {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: number for name, number in found.items() if isinstance(number, int)}
