"""What launchers tell each other about the ends of ranks, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from paceline.diagnose.cause import RankExit
from paceline.run.failures import FailureRecord


def rank_exit_from_json(told: Mapping[str, Any], node: int, late: float) -> RankExit:
    """`late` is what the teller's clock is behind ours."""
    record = None if told["record"] is None else FailureRecord(**told["record"])
    end = RankExit(**{**told, "record": record})
    return replace(end, node=node, time=end.time + late)


def rank_exit_to_json(end: RankExit) -> dict[str, Any]:
    return asdict(end)
