"""The blocks of a model: its repeated layers.

They are the unit of sharding, activation checkpointing and compilation. The recipe lists them, or the model declares
them (`ModelSpec.blocks`, `_no_split_modules` of Hugging Face), or they are detected: the most frequent class in the
module lists of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import LayoutError, did_you_mean
from paceline.models.spec import spec_of

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
                fix="use names from model.named_modules(); * matches any part: blocks.*",
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
