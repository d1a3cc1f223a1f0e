"""What launchers tell each other about the ends of ranks, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from paceline.launcher.cause import RankEnd
from paceline.launcher.failure import Failure


def rank_end(told: Mapping[str, Any], node: int, late: float) -> RankEnd:
    """`late` is what the teller's clock is behind ours."""
    record = None if told["record"] is None else Failure(**told["record"])
    end = RankEnd(**{**told, "record": record})
    return replace(end, node=node, time=end.time + late)


def tell_end(end: RankEnd) -> dict[str, Any]:
    return asdict(end)
