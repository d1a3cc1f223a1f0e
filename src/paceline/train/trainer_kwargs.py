"""Arguments of the Trainer. Settings are top-level keys of a recipe, with sections as dicts; a test compares both. For
methods and arguments that other frameworks have, the error says what to use.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

import torch
from torch import nn

from paceline.config.foreign_names import find_hint
from paceline.config.recipe import Config
from paceline.config.validation import explain_argument
from paceline.models.model_call import stateful
from paceline.models.usage_errors import check_criterion, check_model
from paceline.parallel.data_parallel import CommHook
from paceline.train.callbacks import Callbacks
from paceline.train.checks.unsupported import check_optimizer, check_scheduler

Kind = TypeVar("Kind", bound=type)
Method = TypeVar("Method", bound=Callable[..., Any])
DeviceLike = str | int | torch.device | None


@dataclass
class UserObjects:
    """Objects that the user passes to the Trainer besides the model."""

    optimizer: torch.optim.Optimizer | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    criterion: Callable[..., Any] | None = None
    scheduler: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    collate_fn: Callable[[list[Any]], Any] | None = None
    comm_hook: CommHook | None = None
    callbacks: Callbacks = field(default_factory=lambda: Callbacks(()))
    notes: Sequence[str] = ()  # about the recipe, for the log

    @property
    def stateful_loss(self) -> nn.Module | None:
        return stateful(self.criterion, self.loss_fn)


def hinted(method: Method) -> Method:
    """Unknown keyword arguments of the method get a hint instead of Python's TypeError."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known:
            raise explain_argument(method.__name__, name, kwargs[name], known, Config.model_fields)
        return method(*args, **kwargs)

    return cast("Method", call)


class MethodHints:
    if not TYPE_CHECKING:  # for type checkers, unknown attributes remain errors

        def __getattr__(self, name: str) -> Any:
            hint = find_hint("methods", name)
            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{words}; use {hint}" if hint else words, name=name, obj=self)


class TrainerKwargs(TypedDict, total=False):
    data: str | dict[str, Any] | None
    schedule: str | dict[str, Any]
    layout: dict[str, Any] | None
    ddp: dict[str, Any]
    fsdp: dict[str, Any]
    tensor: dict[str, Any]
    pipeline: dict[str, Any]
    split: dict[str, Any]
    sync: str | dict[str, Any] | None
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
    channels_last: bool
    graph: bool
    deterministic: bool | Literal["everywhere"]
    slices: int
    dropout: Literal["by-sample", "exact", "per-rank"]
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
    run: str | os.PathLike[str] | bool | None
    log_every: int
    eval_every: int | None
    save_every: int | None
    save_minutes: float | None
    save_last: bool
    keep: int | None
    keep_best: int
    keep_every: int | None
    init_from: str | os.PathLike[str] | None
    code: str | os.PathLike[str] | None
    resume: str | None
    loggers: str | Sequence[str]
    tags: str | Sequence[str]
    report: bool
    quiet: bool


def document_settings(kind: Kind) -> Kind:
    """Replace `{settings}` in the docstring of a class by the settings, with the descriptions of the recipe's keys."""
    fields = {name: Config.model_fields[name].description for name in TrainerKwargs.__annotations__}
    lines = [f"{name}: {text}" for name, text in fields.items()]
    kind.__doc__ = (kind.__doc__ or "").replace("{settings}", "\n        ".join(lines))
    return kind


def check_arguments(model: Any, optimizer: Any, loss_fn: Any, criterion: Any, scheduler: Any) -> None:
    """Refuse unusable objects before anything is built."""
    check_model(model)
    check_optimizer(optimizer)
    check_criterion("loss_fn", loss_fn)
    check_criterion("criterion", criterion)
    check_scheduler(scheduler)
