"""The module that DDP or FSDP wraps: the user's model together with its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.model_call import CallRule, read_loss


class LossModule(nn.Module):
    """The module that DDP or FSDP wraps: maps a batch to (sum or mean, weight or None).

    It computes the loss too, so that a loss function may call any method of the model under the wrapper. The user's
    model is a submodule, so its parameter names get no prefixes.
    """

    def __init__(self, model: nn.Module, context: AbstractContextManager[Any] | None = None) -> None:
        super().__init__()
        self.model = model
        self.context = context
        self.call: CallRule | None = None
        self.metrics: Mapping[str, Any] | None = None  # of the last forward, if the model returns any

    def forward(self, batch: Any, function: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Return (sum or mean, weight or None), or `function(model, batch)` if given: every call of the model must go
        through this method, where the wrappers' hooks run."""
        if function is not None:
            with self.context or nullcontext():
                return function(self.model, batch)
        assert self.call is not None
        if self.context is None:
            result = self.call.loss(self.model, batch)
        else:
            with self.context:
                result = self.call.loss(self.model, batch)
        if type(result) is Tensor and result.dtype is torch.float32 and not result.dim():
            return result, None  # the common case, without another call
        value, weight, self.metrics = read_loss(result)
        return value, weight
