"""The blocks of a model: the like layers that most of it is made of.

Sharding gathers one block's weights at a time, recomputation drops one block's activations, compilation compiles one
block once. Which modules these are is named in the recipe, or declared by the model (`ModelSpec.blocks`, Hugging Face's
`_no_split_modules`), or found: the modules of the kind that stands most often in the model's lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import LayoutError, did_you_mean
from paceline.models.spec import spec_of

Named = tuple[str, nn.Module]


def find_blocks(model: nn.Module, wanted: Sequence[str] | None = None) -> list[Named]:
    """Blocks with their names, in the model's order; none of them lies within another."""
    if wanted is not None:
        return _named(model, wanted)
    declared = spec_of(model).blocks
    return _named(model, declared) if declared else _outermost(_most_frequent(model))


def _named(model: nn.Module, patterns: Sequence[str]) -> list[Named]:
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(
                "no-such-block",
                f"blocks names {pattern!r}, but the model {type(model).__name__} has no such module: "
                f"{did_you_mean(pattern, [name for name in modules if name])}",
                fix="use names of model.named_modules(); * stands for any part: blocks.*",
            )
        found |= {name: modules[name] for name in names}
    return _outermost([(name, module) for name, module in modules.items() if name in found])


def _most_frequent(model: nn.Module) -> list[Named]:
    """Members of lists, by kind. Layers made of layers are preferred: a list of bare linear layers is a model's last
    resort."""
    made_of_layers: dict[type, list[Named]] = defaultdict(list)
    bare: dict[type, list[Named]] = defaultdict(list)
    for name, parent in model.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            for key, child in parent.named_children():
                if any(True for _ in child.parameters()) and not isinstance(child, (nn.ModuleList, nn.Sequential)):
                    kinds = made_of_layers if any(True for _ in child.children()) else bare
                    kinds[type(child)].append((f"{name}.{key}" if name else key, child))
    for kinds in (made_of_layers, bare):
        most = max(kinds.values(), key=len, default=[])
        if len(most) > 1:
            return most
    return []


def _outermost(found: list[Named]) -> list[Named]:
    names = {name for name, _ in found}

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in names for length in range(1, len(parts)))

    return [(name, module) for name, module in found if not is_inside(name)]
