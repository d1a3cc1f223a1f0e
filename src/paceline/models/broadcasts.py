"""Regression losses whose output and target broadcast, as (8, 1) and (8,) do."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.run.user_frame import running_user_frame

_ELEMENTWISE = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)


class Broadcasts(TorchFunctionMode):
    """Finds an elementwise loss whose output and target broadcast to more elements than either of them has."""

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self._name = type(criterion).__name__ if isinstance(criterion, nn.Module) else None
        self.found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ELEMENTWISE or args[0].shape == args[1].shape:
            return func(*args, **kwargs) if kwargs else func(*args)
        with warnings.catch_warnings():  # torch's own, which would name a line of paceline
            warnings.simplefilter("ignore")
            result = func(*args, **kwargs)
        output, target = args[:2]
        shape = torch.broadcast_shapes(output.shape, target.shape)
        if shape.numel() > max(output.numel(), target.numel()) and self.found is None:
            fix = "make their shapes equal"
            if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
                fix = "squeeze the output (.squeeze(-1)), or use targets.unsqueeze(-1)"
            self.found = (
                f"output {tuple(output.shape)} and target {tuple(target.shape)} broadcast to {tuple(shape)} in "
                f"{self._name or func.__name__}: every output is compared with every target; {fix} "
                f"({running_user_frame()})"
            )
        return result
