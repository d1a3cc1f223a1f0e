"""The Trainer's plain-valued keywords: a recipe's top-level keys, with sections as dicts.

A test holds this list and `Config` together.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class Settings(TypedDict, total=False):
    schedule: dict[str, Any]
    batch: int | None
    batch_per_rank: int | None
    micro_batch: int | None
    accumulate: int | None
    strategy: Literal["auto", "single", "ddp"]
    precision: Literal["fp32", "fp64"]
    seed: int
    clip_norm: float | None
    shuffle: bool
    workers: int
    backend: Literal["nccl", "gloo", "mpi"] | None
    timeout: float
    fallback: bool
    run: str | bool | None
    log_every: int
    eval_every: int | None
    quiet: bool
