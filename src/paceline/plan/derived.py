"""Derived values, each with the reason for it, and their table.

The Trainer, the planner and `paceline config show` use the same functions, so what is shown is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FROM_SETTINGS = "requested"  # in a recipe or by a keyword of the Trainer
_LABELS = {"horizon": "total steps"}  # of rows, on screen


@dataclass(frozen=True)
class Derived:
    """A value and the reason for it."""

    value: int | float | str
    reason: str


def table(rows: Mapping[str, Derived]) -> str:
    """Derived values in three columns: name, value, reason."""
    rows = {_LABELS.get(name, name): row for name, row in rows.items()}
    names = max(len(name) for name in rows)
    values = max(len(_value(row.value)) for row in rows.values())
    return "\n".join(f"  {name:<{names}}  {_value(row.value):<{values}}  {row.reason}" for name, row in rows.items())


def _value(value: int | float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
