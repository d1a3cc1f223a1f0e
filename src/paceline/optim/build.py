"""Optimizers by name, fused where torch can."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.config.sections import Optimizer as Settings
from paceline.errors import TrainError


def build_optimizer(model: nn.Module, settings: Settings, lr: float) -> torch.optim.Optimizer:
    """The recipe's optimizer over the model's trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise TrainError(
            "nothing-to-train",
            f"The model {type(model).__name__} has no parameters that need gradients.",
            fix="check requires_grad, or that the layers are attributes of the module",
        )
    common: dict[str, Any] = {"lr": lr, "fused": _can_fuse(parameters)}
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, weight_decay=settings.weight_decay, **common)
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    first, second = settings.betas
    return kind(_decay_groups(model, settings.weight_decay), betas=(first, second), **common)


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only: norms and biases have no reason to be small."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(p.is_floating_point() and p.device.type in {"cpu", "cuda"} for p in parameters)
