"""Things that all ranks must have alike, and the ranks that differ, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.errors import WorldError
from paceline.runtime import objects
from paceline.text import flatten, numbered

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
            "The ranks came with different calls:\n" + by_rank(calls),
            why="a collective needs the same operation, shape and dtype from every rank; else it hangs or mixes data",
            fix="look for a branch on the rank, or for data of uneven size, before this call",
        )


def _describe(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def require_same_recipe(recipes: Sequence[Mapping[str, Any]]) -> None:
    """Every rank's effective recipe must be rank 0's; else name the keys and who has what."""
    count, lines = _differences([flatten(recipe) for recipe in recipes])
    if count:
        raise WorldError(
            "different-recipes",
            f"The ranks do not run the same recipe; {_counted(count, 'key')}:\n{lines}",
            why="ranks with different settings train different models and wait for each other in vain",
            fix="start every rank with the same recipe, overrides and code",
        )


def require_same_versions(versions: Sequence[Mapping[str, str]]) -> None:
    count, lines = _differences(versions)
    if count:
        raise WorldError(
            "different-versions",
            f"The ranks run different versions:\n{lines}",
            why="their numbers need not agree, and neither need what they send each other",
            fix="install the same versions on every node",
        )


def require_same_weights(digests: Sequence[Mapping[str, int]]) -> None:
    """Each rank's checksum of every parameter."""
    count, lines = _differences([{name: f"checksum {digest}" for name, digest in rank.items()} for rank in digests])
    if count:
        raise WorldError(
            "different-weights",
            f"The ranks do not hold the same weights; {_counted(count, 'parameter')}:\n{lines}",
            why="replicas that start apart stay apart: what is averaged are gradients of different models",
            fix="change weights before the Trainer is built, or alike on every rank (trainer.load_checkpoint does)",
        )


def _counted(count: int, thing: str) -> str:
    return f"1 {thing} differs" if count == 1 else f"{count} {thing}s differ"


def _differences(values: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """How many keys have not the same value on every rank, and who has what of the first of them."""
    keys = sorted({key for own in values for key in own})
    differing = [key for key in keys if any(own.get(key) != values[0].get(key) for own in values)]
    lines = []
    for key in differing[:8]:
        lines.append(f"    {key}:")
        lines.append(by_rank([repr(own.get(key, "(not set)")) for own in values], indent="      "))
    return len(differing), "\n".join(lines)


def by_rank(values: Sequence[str], indent: str = "    ") -> str:
    """One line a distinct value, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "\n".join(f"{indent}{numbered('rank', who)}: {value}" for value, who in ranks.items())
