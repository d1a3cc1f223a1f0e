"""Things that all ranks must have alike, and the ranks that differ, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.errors import WorldError
from paceline.runtime import objects

# Fixed, because ranks that disagree on the call also disagree on how long its description is.
_DESCRIPTION_BYTES = 256


def require_same_call(
    operation: str, tensor: torch.Tensor | None, detail: str, group: torch_dist.ProcessGroup | None
) -> None:
    """Every rank must have come with the same collective; else name each rank with what it brought."""
    what = f"{operation}({_describe(tensor)}{', ' if tensor is not None and detail else ''}{detail})"
    sent = objects.as_tensor(what.encode()[:_DESCRIPTION_BYTES], _DESCRIPTION_BYTES, objects.message_device(group))
    received = [torch.empty_like(sent) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(received, sent, group=group)
    calls = [bytes(data.cpu().numpy()).decode(errors="replace").rstrip("\0") for data in received]
    if len(set(calls)) > 1:
        raise WorldError(
            "different-collectives",
            "The ranks came with different calls:\n" + _by_rank(calls),
            why="a collective needs the same operation, shape and dtype from every rank; else it hangs or mixes data",
            fix="look for a branch on the rank, or for data of uneven size, before this call",
        )


def _describe(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def require_same_recipe(recipes: Sequence[Mapping[str, Any]]) -> None:
    """Every rank's effective recipe must be rank 0's; else name the keys and who has what."""
    flat = [_flatten(recipe) for recipe in recipes]
    keys = sorted({key for recipe in flat for key in recipe})
    differing = [key for key in keys if any(recipe.get(key) != flat[0].get(key) for recipe in flat)]
    if not differing:
        return
    lines = []
    for key in differing[:8]:
        lines.append(f"    {key}:")
        lines.append(_by_rank([repr(recipe.get(key, "(not set)")) for recipe in flat], indent="      "))
    raise WorldError(
        "different-recipes",
        f"The ranks do not run the same recipe; {len(differing)} keys differ:\n" + "\n".join(lines),
        why="ranks with different settings train different models and wait for each other in vain",
        fix="start every rank with the same recipe, overrides and code",
    )


def _by_rank(values: Sequence[str], indent: str = "    ") -> str:
    """One line a distinct value, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "\n".join(
        f"{indent}rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {value}" for value, who in ranks.items()
    )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
