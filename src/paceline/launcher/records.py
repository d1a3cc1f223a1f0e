"""What launchers tell each other about ranks and errors, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from paceline.errors import LaunchError, PacelineError
from paceline.launcher.cause import RankEnd
from paceline.launcher.failure import Failure


def rank_end(told: Mapping[str, Any], node: int, late: float) -> RankEnd:
    """`late` is what the teller's clock is behind ours."""
    record = None if told["record"] is None else Failure(**told["record"])
    end = RankEnd(**{**told, "record": record})
    return replace(end, node=node, time=end.time + late)


def tell_end(end: RankEnd) -> dict[str, Any]:
    return asdict(end)


def error_parts(error: PacelineError) -> dict[str, str]:
    family, name = error.code.split(".", 1)
    return {"family": family, "name": name, "what": error.what, "why": error.why, "fix": error.fix}


def error(parts: Mapping[str, str]) -> PacelineError:
    """The error that another process raised."""
    family = next((kind for kind in PacelineError.__subclasses__() if kind.family == parts["family"]), LaunchError)
    return family(parts["name"], parts["what"], why=parts["why"], fix=parts["fix"])
