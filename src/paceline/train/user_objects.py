"""What the user passes to the Trainer besides the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.models.model_call import stateful
from paceline.parallel.data_parallel import CommHook
from paceline.train.callbacks import Callbacks

DeviceLike = str | int | torch.device | None


@dataclass
class UserObjects:
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
