"""Checks that something is the same on all ranks; the errors name the ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.errors import WorldError
from paceline.runtime import objects
from paceline.text import flatten, numbered

# Fixed, because descriptions of different calls have different lengths.
_DESCRIPTION_BYTES = 256


def require_same_call(
    operation: str, tensor: torch.Tensor | None, detail: str, group: torch_dist.ProcessGroup | None
) -> None:
    """Raise unless every rank calls this collective with the same shape and dtype.

    Collective: must be called on every rank of the group.
    """
    call = f"{operation}({_describe(tensor)}{', ' if tensor is not None and detail else ''}{detail})"
    sent = objects.as_tensor(call.encode()[:_DESCRIPTION_BYTES], _DESCRIPTION_BYTES, objects.message_device(group))
    received = [torch.empty_like(sent) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(received, sent, group=group)
    calls = [bytes(data.cpu().numpy()).decode(errors="replace").rstrip("\0") for data in received]
    if len(set(calls)) > 1:
        raise WorldError(
            "different-collectives",
            "Ranks called different collectives:\n" + by_rank(calls),
            why="a collective needs the same operation, shape and dtype on every rank, or it hangs or corrupts data",
            fix="look for a branch that depends on the rank, or data of different sizes, before this call",
        )


def _describe(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def require_same_recipe(recipes: Sequence[Mapping[str, Any]]) -> None:
    """`recipes`: the effective recipe of each rank."""
    count, lines = _differences([flatten(recipe) for recipe in recipes])
    if count:
        raise WorldError(
            "different-recipes",
            f"Ranks have different recipes; {_counted(count, 'key')}:\n{lines}",
            why="ranks with different settings train different models, or deadlock",
            fix="start every rank with the same recipe, overrides and code",
        )


def require_same_versions(versions: Sequence[Mapping[str, str]]) -> None:
    """`versions`: the versions that each rank runs, by package."""
    count, lines = _differences(versions)
    if count:
        raise WorldError(
            "different-versions",
            f"Ranks run different versions:\n{lines}",
            why="their results and messages may not be compatible",
            fix="install the same versions on every node",
        )


def require_same_weights(checksums: Sequence[Mapping[str, int]]) -> None:
    """`checksums`: the checksum of every parameter on each rank."""
    count, lines = _differences([{name: f"checksum {value}" for name, value in rank.items()} for rank in checksums])
    if count:
        raise WorldError(
            "different-weights",
            f"Replicas hold different weights; {_counted(count, 'parameter')}:\n{lines}",
            why="replicas that start with different weights stay different: only their gradients are averaged",
            fix="change weights before building the Trainer, or identically on every rank (trainer.load_checkpoint)",
        )


def _counted(count: int, thing: str) -> str:
    return f"1 {thing} differs" if count == 1 else f"{count} {thing}s differ"


def _differences(ranks: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """The number of keys whose value differs between ranks, and a table of the first ones."""
    keys = sorted({key for values in ranks for key in values})
    differing = [key for key in keys if any(values.get(key) != ranks[0].get(key) for values in ranks)]
    lines = []
    for key in differing[:8]:
        lines.append(f"    {key}:")
        lines.append(by_rank([repr(values.get(key, "(not set)")) for values in ranks], indent="      "))
    return len(differing), "\n".join(lines)


def by_rank(values: Sequence[str], indent: str = "    ") -> str:
    """One line per distinct value, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "\n".join(f"{indent}{numbered('rank', who)}: {value}" for value, who in ranks.items())
