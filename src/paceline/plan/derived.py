"""A value that follows from others, with its reason, and a table of such values.

The Trainer, the planner and `paceline config show` all ask this room, so what is shown can't differ from what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FROM_RECIPE = "as set"


@dataclass(frozen=True)
class Derived:
    """A value and why it is that."""

    value: int | float | str
    reason: str


def table(rows: Mapping[str, Derived]) -> str:
    """Derived values in three columns: name, value, reason."""
    names = max(len(name) for name in rows)
    values = max(len(_value(row.value)) for row in rows.values())
    return "\n".join(f"  {name:<{names}}  {_value(row.value):<{values}}  {row.reason}" for name, row in rows.items())


def _value(value: int | float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
