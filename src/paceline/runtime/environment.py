"""This process's place in the world, read from the environment.

The only file that spells the names of environment variables that say who a rank is. torchrun, paceline's own launcher
and `torch.distributed.launch` all use the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import WorldError

RUN_FOLDER = "PACELINE_RUN"
DEBUG = "PACELINE_DEBUG"
LAUNCHED = "PACELINE_LAUNCHED"


@dataclass(frozen=True)
class Place:
    """Who this process is: its rank among `world`, and its place on its own node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return -(-self.world // self.local_world)


def read_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that a launcher gave this process, or None where there was no launcher."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK", rank)
    local_world = _number(environment, "LOCAL_WORLD_SIZE", world)
    if not 0 <= rank < world:
        raise WorldError(
            "bad-environment",
            f"RANK is {rank} and WORLD_SIZE is {world}.",
            why="ranks count from 0 to WORLD_SIZE - 1",
            fix="let a launcher set these: paceline launch -n 2 script.py",
        )
    return Place(rank, world, local_rank, local_world)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise WorldError(
            "bad-environment", f"The environment variable {name} is {text!r}, not a whole number."
        ) from None


def master(environment: Mapping[str, str] = os.environ) -> str | None:
    """Where the ranks meet, as address:port."""
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return None


def variables(place: Place) -> dict[str, str]:
    """A place as a launcher writes it."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world),
    }


def run_folder(environment: Mapping[str, str] = os.environ) -> str | None:
    """The run folder that the launcher made for this run."""
    return environment.get(RUN_FOLDER) or None


def was_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether paceline's own launcher started this process: it then shows failures, so the rank need not."""
    return LAUNCHED in environment


def debug_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(DEBUG, "").lower() in {"1", "true", "on", "yes"}
