"""What `paceline bench comm` asks of its ranks. The request reaches them as JSON, on any node, so that it is the
argument of the module that each of them runs (comm_rank.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from paceline.errors import LaunchError, did_you_mean
from paceline.plan.network_model import COLLECTIVES

SIZES = tuple(1024 * 4**power for power in range(10))  # 1 KiB to 256 MiB
DEFAULT_COLLECTIVES = tuple(COLLECTIVES)
SECONDS = 10.0
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SMALLEST = 16  # bytes; a message has a number for each rank


@dataclass(frozen=True)
class CommRequest:
    """`seconds`: for each collective. `recipe`: whose step advice is about; None: no advice."""

    collectives: tuple[str, ...] = DEFAULT_COLLECTIVES
    sizes: tuple[int, ...] = SIZES
    seconds: float = SECONDS
    backend: str | None = None
    device: str | int | None = None
    json: str | None = None  # file for the report; "-": standard output
    html: str | None = None
    recipe: Mapping[str, Any] | None = None

    def require_fit(self) -> None:
        """Advice is derived from the fit of all_reduce."""
        if self.recipe is not None and ("all_reduce" not in self.collectives or len(self.sizes) < 2):
            raise LaunchError(
                "bad-options",
                "Advice for a recipe needs all_reduce, measured with at least two sizes.",
                fix="omit --collectives and --sizes, or pass no recipe",
            )

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> CommRequest:
        return TypeAdapter(cls).validate_json(text)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1KiB,64KiB,1MiB` in ascending order; a number alone is in bytes."""
    return tuple(sorted({_parse_size(part.strip()) for part in text.split(",")}))


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})\s*([A-Za-z]*)", text, re.ASCII)
    units = {"": 1} | {name.lower(): size for name, size in _UNITS.items()}
    size = 0 if found is None else int(found[1]) * units.get(found[2].lower(), 0)
    if size < _SMALLEST:
        raise LaunchError(
            "bad-options",
            f"Invalid size in --sizes: {text!r}.",
            fix=f"pass at least {_SMALLEST} bytes, e.g. --sizes 1KiB,64KiB,1MiB; units: B, KiB, MiB, GiB",
        )
    return size


def format_size(size: float) -> str:
    """`1 KiB`, `1020 B`, `1.5 MiB`"""
    unit = max((each for each in _UNITS if _UNITS[each] <= size), key=_UNITS.__getitem__, default="B")
    return f"{size / _UNITS[unit]:.4g} {unit}"


def parse_collectives(text: str) -> tuple[str, ...]:
    """`all_reduce,broadcast`, also with hyphens."""
    names = tuple(part.strip().replace("-", "_") for part in text.split(","))
    for name in names:
        if name not in COLLECTIVES:
            raise LaunchError("bad-options", f"Unknown collective: {name!r}.", fix=did_you_mean(name, COLLECTIVES))
    return names


def require_peers(ranks: int) -> None:
    if ranks < 2:
        raise LaunchError(
            "one-rank", "paceline bench comm was started with a single rank, which communicates with nobody."
        )
