"""The time of a step on several ranks, from parts that can be measured separately.

A step takes as long as the computation of its slowest rank, and the communication that is left after the last gradient.
DDP reduces its buckets one after the other, each from when it is ready, while the backward computes the next ones. On a
CPU, communication needs cores as well: it overlaps with the computation only as far as there are more cores than ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.batch import derive_batch
from paceline.plan.layout import derive_layout
from paceline.text import plural

# The speed-up of data parallelism over one GPU that is usually expected, from near-linear to diminishing returns.
EXPECTED = {2: (1.8, 1.9), 4: (3.5, 3.8), 8: (6.5, 7.5), 16: (12.0, 14.0)}


def exposed_after(leads: Sequence[float], times: Sequence[float], overlap: float = 1.0) -> float:
    """Seconds of communication after the last gradient. `leads`: how much earlier each bucket is ready; `times`: how
    long its reduction takes; `overlap`: the share of this work that can be done during the backward."""
    end = -float("inf")
    for lead, seconds in zip(leads, times, strict=True):
        end = max(end, -lead) + seconds
    return overlap * max(0.0, end) + (1.0 - overlap) * sum(times)


def free_cores(cores: int, ranks: int) -> float:
    """Cores for the communication of each rank while all of them compute, at most 1."""
    return min(1.0, max(0.0, cores / ranks - 1.0))


def scaled(config: Config, mode: str, ranks: int, first: int) -> Config:
    """The recipe with another batch. Strong scaling keeps that of the recipe on the `first` number of ranks; weak
    scaling keeps the part of each rank."""
    batch = derive_batch(config, derive_layout(config, first)).size
    size = batch if mode == "strong" else round(batch * ranks / first)
    if size < ranks:
        raise ConfigError(
            "batch-smaller-than-ranks",
            f"A batch of {plural(size, 'sample')} can't be divided among {ranks} ranks.",
            fix="use fewer ranks, a larger batch (batch=64), or weak scaling",
        )
    accumulate = None if config.micro_batch is not None else config.accumulate  # then it follows from the other two
    return Config.from_dict({**config.to_dict(), "batch": size, "batch_per_rank": None, "accumulate": accumulate})


def bare(config: Config) -> Config:
    """The steps of a recipe: without files, and without evaluations, which its schedule might need."""
    changes: dict[str, Any] = {
        "train": {"max_steps": 1},
        "schedule": {"name": "constant"},
        "run": False,
        "resume": None,
        "quiet": True,
        "save_last": False,
        "loggers": [],
        "metrics": [],
    }
    absent = ("init_from", "eval_every", "save_every", "save_minutes", "save_best", "early_stop", "profile")
    return Config.from_dict({**config.to_dict(), **changes, **dict.fromkeys(absent)})


def digest(config: Config) -> str:
    """Equal for recipes with the same steps."""
    values = bare(config).model_dump(mode="json", exclude={"launch", "env", "port", "timeout"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
