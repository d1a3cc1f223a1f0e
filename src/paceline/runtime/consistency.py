"""Checks that something is the same on all ranks; the errors name the ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import WorldError
from paceline.text import flatten, numbered, plural


def require_same_recipe(recipes: Sequence[Mapping[str, Any]]) -> None:
    """`recipes`: the effective recipe of each rank."""
    _require_same(
        [flatten(recipe) for recipe in recipes],
        lambda table: WorldError(
            "different-recipes",
            f"Ranks have different recipes {table}",
            why="ranks with different settings train different models, or deadlock",
            fix="start every rank with the same recipe, overrides and code",
        ),
    )


def require_same_versions(versions: Sequence[Mapping[str, str]]) -> None:
    """`versions`: the versions that each rank runs, by package."""
    _require_same(
        versions,
        lambda table: WorldError(
            "different-versions",
            f"Ranks run different versions {table}",
            why="their results and messages may not be compatible",
            fix="install the same versions on every node",
        ),
    )


def require_same_weights(checksums: Sequence[Mapping[str, int]]) -> None:
    """`checksums`: the checksum of every parameter on each rank."""
    _require_same(
        [{name: f"checksum {value}" for name, value in rank.items()} for rank in checksums],
        lambda table: WorldError(
            "different-weights",
            f"Replicas hold different weights {table}",
            why="replicas that start with different weights stay different: only their gradients are averaged",
            fix="change weights before building the Trainer, or identically on every rank (trainer.load_checkpoint)",
        ),
    )


def _require_same(ranks: Sequence[Mapping[str, Any]], error: Callable[[str], WorldError]) -> None:
    keys = sorted({key for values in ranks for key in values})
    differing = [key for key in keys if any(values.get(key) != ranks[0].get(key) for values in ranks)]
    lines = [f"({plural(len(differing), 'difference')}):"]
    for key in differing[:8]:
        values_by_rank = [repr(values.get(key, "(not set)")) for values in ranks]
        lines += [f"    {key}:", by_rank(values_by_rank, indent="      ")]
    if differing:
        raise error("\n".join(lines))


def by_rank(values: Sequence[str], indent: str = "    ", ranks: Sequence[int] | None = None) -> str:
    """One line per distinct value, with the ranks that have it. `ranks`: those of the values, if not all."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return "\n".join(f"{indent}{numbered('rank', who)}: {value}" for value, who in found.items())
