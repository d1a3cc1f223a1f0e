"""Keyword settings of the Trainer: top-level keys of a recipe, with sections as dicts; a test compares both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict


class TrainerKwargs(TypedDict, total=False):
    data: str | dict[str, Any] | None
    schedule: str | dict[str, Any]
    layout: dict[str, Any] | None
    ddp: dict[str, Any]
    fsdp: dict[str, Any]
    tensor: dict[str, Any]
    pipeline: dict[str, Any]
    split: dict[str, Any]
    scaler: dict[str, Any]
    checkpoint: dict[str, Any]
    ema: float | bool | dict[str, Any] | None
    save_best: str | bool | dict[str, Any] | None
    early_stop: int | bool | dict[str, Any] | None
    profile: bool | Sequence[int] | dict[str, Any] | None
    batch: int | None
    batch_per_rank: int | None
    micro_batch: int | Literal["auto"] | None
    accumulate: int | None
    strategy: Literal["auto", "single", "dp", "ddp", "fsdp", "hsdp", "tp", "pp", "split"]
    blocks: str | Sequence[str] | None
    recompute: str
    precision: Literal["fp32", "bf16", "fp16", "fp64"]
    tf32: bool
    compile: bool | Literal["blocks", "model"]
    deterministic: bool
    preflight: bool
    unused_parameters: Literal["error", "allow"]
    sync_batchnorm: bool
    nonfinite: Literal["raise", "skip", "stop"]
    seed: int
    clip_norm: float | None
    clip_value: float | None
    scheduler_interval: Literal["epoch", "step"]
    shuffle: bool
    workers: int
    backend: Literal["nccl", "gloo", "mpi"] | None
    timeout: float
    fallback: bool
    run: str | bool | None
    log_every: int
    eval_every: int | None
    save_every: int | None
    save_minutes: float | None
    save_last: bool
    keep: int | None
    keep_best: int
    keep_every: int | None
    resume: str | None
    loggers: str | Sequence[str]
    quiet: bool
