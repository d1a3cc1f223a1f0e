"""Optimizers by name.

`build_optimizer` gives the recipe's optimizer over the parameters that need gradients: fused where torch can, weight
decay on matrices only, and parameter names in every group, so that its state can be told apart by a person.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.config.components import OPTIMIZERS, OptimizerFacts
from paceline.config.sections import OptimizerSection as Settings
from paceline.errors import TrainError
from paceline.optim.muon import MuonAdamW, hidden_matrices

MUON_MOMENTUM = 0.95  # that of Muon's authors

NamedParameter = tuple[str, nn.Parameter]
Builder = TypeVar("Builder", bound=Callable[..., torch.optim.Optimizer])


@dataclass(frozen=True)
class OptimizerParams:
    """What an optimizer is built over."""

    model: nn.Module
    named: list[NamedParameter]  # the trainable ones
    groups: list[dict[str, Any]]  # the same, by weight decay
    fused: bool  # whether torch's fused kernels take them


def build_optimizer(model: nn.Module, settings: Settings, lr: float) -> torch.optim.Optimizer:
    """The recipe's optimizer over the model's trainable parameters."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise TrainError(
            "nothing-to-train",
            f"The model {type(model).__name__} has no parameters that need gradients.",
            fix="check requires_grad, or that the layers are attributes of the module",
        )
    params = OptimizerParams(model, named, _decay_groups(named, settings.weight_decay), _can_fuse(named))
    build = OPTIMIZERS.find(settings.name)
    optimizer: torch.optim.Optimizer = build(params, settings, lr, **settings.options())
    return optimizer


def register_optimizer(
    name: str, *, state_per_param: int = 2, elementwise: bool = False, needs_full: bool = False
) -> Callable[[Builder], Builder]:
    """Register an optimizer of your own, for `optimizer.name` in a recipe or `Trainer(optimizer={"name": …})`.

        @paceline.register_optimizer("lion", state_per_param=1, elementwise=True)
        def lion(params, settings, lr, *, decay=0.99):
            return Lion(params.groups, lr=lr, decay=decay)

    `params.groups` are parameter groups as torch.optim takes them, `settings` is the recipe's section, and `lr` the
    highest learning rate. Further parameters are options: `optimizer: {name: lion, decay: 0.98}`.

    `state_per_param` counts the tensors that it keeps for each parameter, for the memory estimate. Where weights are
    sharded, an `elementwise` optimizer gets this rank's shards as plain tensors, one that `needs_full` is refused, and
    any other gets DTensors.
    """
    facts = OptimizerFacts(state_per_param=state_per_param, elementwise=elementwise, needs_full=needs_full)
    OPTIMIZERS.declare(name, facts)
    return OPTIMIZERS.implement(name)


@OPTIMIZERS.implement("sgd")
def sgd(params: OptimizerParams, settings: Settings, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.groups, lr=lr, momentum=settings.momentum or 0.0, fused=params.fused)


@OPTIMIZERS.implement("adam")
def adam(params: OptimizerParams, settings: Settings, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params.groups, lr=lr, betas=_betas(settings), fused=params.fused)


@OPTIMIZERS.implement("adamw")
def adamw(params: OptimizerParams, settings: Settings, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params.groups, lr=lr, betas=_betas(settings), fused=params.fused)


@OPTIMIZERS.implement("adafactor")
def adafactor(params: OptimizerParams, settings: Settings, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params.groups, lr=lr)


@OPTIMIZERS.implement("muon")
def muon(params: OptimizerParams, settings: Settings, lr: float) -> torch.optim.Optimizer:
    hidden = hidden_matrices(params.model)
    mine = {id(parameter) for _, parameter in hidden}
    rest = [(name, parameter) for name, parameter in params.named if id(parameter) not in mine]
    if not hidden:
        raise TrainError(
            "no-such-optimizer",
            f"muon finds no hidden matrix in the model {type(params.model).__name__}.",
            why="it is made for the weights of linear layers inside a model; embeddings, the output layer, "
            "convolutions, norms and biases are AdamW's, and here that is everything",
            fix="set optimizer.name: adamw (or sgd, as is usual for convolutions)",
        )
    return MuonAdamW(
        {"params": hidden, "weight_decay": settings.weight_decay},
        _decay_groups(rest, settings.weight_decay),
        lr=lr,
        momentum=MUON_MOMENTUM if settings.momentum is None else settings.momentum,
        betas=_betas(settings),
        fused=_can_fuse(rest),
    )


def _decay_groups(named: list[NamedParameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only: norms and biases have no reason to be small. Without any, one group will do."""
    if weight_decay == 0.0:
        return [{"params": named, "weight_decay": 0.0}]
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zeros, from which the first step makes what it would have made without them.

    torch's fused SGD leaves its buffers unwritten when the first step is skipped (fp16, nonfinite), and goes on with
    whatever lay in that memory.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            if group["fused"] and group["momentum"] and not group["dampening"]:
                for parameter in group["params"]:
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def reset_state(optimizer: torch.optim.Optimizer) -> None:
    """As if it had never taken a step."""
    optimizer.state.clear()  # in place, as its parts may share it
    if isinstance(optimizer, torch.optim.Adagrad):  # the only one of torch's that makes its state when it is made
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                total = torch.full_like(parameter, group["initial_accumulator_value"])
                on_device = parameter.device if group.get("fused") else None
                optimizer.state[parameter] |= {"step": torch.zeros((), device=on_device), "sum": total}
    fill_momentum(optimizer)


def _betas(settings: Settings) -> tuple[float, float]:
    first, second = settings.betas
    return first, second


def _can_fuse(named: list[NamedParameter]) -> bool:
    # What is on meta will be filled on one of the others.
    return all(p.is_floating_point() and p.device.type in {"cpu", "cuda", "meta"} for _, p in named)
