"""Optimizers by name.

`build_optimizer` builds the recipe's optimizer for the parameters that require gradients: fused if torch supports it,
weight decay on matrices only, and parameter names in every group, so that its state can be identified.

`muon` is Muon for hidden matrices and AdamW for all other parameters, as one optimizer. Muon replaces the momentum of a
matrix by the nearest orthogonal matrix, which is intended for weights that map hidden vectors to hidden vectors.
Embeddings, the output layer, norms, biases and convolutions use AdamW. Muon's updates are scaled to the RMS of AdamW's
(`match_rms_adamw`), so both share one learning rate and one weight decay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.config.components import OPTIMIZERS, OptimizerFacts
from paceline.config.sections import OptimizerSection as Settings
from paceline.errors import TrainError
from paceline.models.usage_errors import require_trainable

MUON_MOMENTUM = 0.95  # recommended by the authors of Muon

NamedParameter = tuple[str, nn.Parameter]
Builder = TypeVar("Builder", bound=Callable[..., torch.optim.Optimizer])


class MuonAdamW(torch.optim.Optimizer):
    """Both parts share the `param_groups` and the state of this optimizer.

    Groups are fixed at construction, because `add_param_group` cannot tell which part a parameter belongs to.
    """

    def __init__(
        self,
        hidden: dict[str, Any],
        rest: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        fused: bool,
    ) -> None:
        muon = torch.optim.Muon([hidden], lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = [muon]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, fused=fused))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Share the groups and the state of this optimizer with its parts; the first group is Muon's."""
        for part, groups in zip(self._parts, (self.param_groups[:1], self.param_groups[1:]), strict=False):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # replaces the groups and the state
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The 2-D parameters that are neither an embedding (or tied to one) nor the output layer."""
    outside = [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    head = _output_layer(model)
    if head is not None:
        outside.append(head.weight)
    excluded = {id(weight) for weight in outside}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dim() == 2 and id(parameter) not in excluded
    ]


def _output_layer(model: nn.Module) -> nn.Linear | None:
    """The last linear layer, unless it is inside a block of an `nn.ModuleList`.

    Such a model has no separate output layer: its output is a tied embedding, or hidden vectors.
    """
    modules = dict(model.named_modules())
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not linears:
        return None
    blocks = [name for name in modules if isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)]
    if any(linears[-1].startswith(f"{block}.") for block in blocks):
        return None
    last = modules[linears[-1]]
    return last if isinstance(last, nn.Linear) else None


@dataclass(frozen=True)
class OptimizerParams:
    """The parameters to optimize."""

    model: nn.Module
    named: list[NamedParameter]
    groups: list[dict[str, Any]]  # the same, by weight decay
    fused: bool  # whether torch's fused kernels support them


def build_optimizer(model: nn.Module, settings: Settings, lr: float) -> torch.optim.Optimizer:
    """The recipe's optimizer for a model. It skips frozen parameters, which may be unfrozen later."""
    named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()]
    require_trainable(model)
    params = OptimizerParams(model, named, _decay_groups(named, settings.weight_decay), _can_fuse(named))
    build = OPTIMIZERS.find(settings.name, settings.options())
    optimizer: Any = build(params, settings, lr, **settings.options())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainError(
            "not-an-optimizer",
            f"The optimizer {settings.name!r} is a {type(optimizer).__name__} ({OPTIMIZERS.place(settings.name)}).",
        )
    return optimizer


def register_optimizer(
    name: str, *, state_per_param: int = 2, elementwise: bool = False, needs_full: bool = False
) -> Callable[[Builder], Builder]:
    """Decorator that registers a custom optimizer, for `optimizer.name` in a recipe and `Trainer(optimizer=…)`.

    The function is called with `params`, whose `groups` are torch.optim parameter groups, the `optimizer:` section of
    the recipe, and the base learning rate. Further parameters are options: `optimizer: {name: plain, decay: 0.98}`.

    Args:
        name: of the optimizer
        state_per_param: number of state tensors per parameter, for the memory estimate
        elementwise: whether it treats each element by itself, so that it may receive local shards as plain tensors;
            otherwise it receives DTensors, if parameters are sharded
        needs_full: whether it needs full parameters, so that it is rejected if they are sharded

    Returns:
        The decorator.

    Raises:
        TrainError: `train.bad-registration`: the name is not a string, or what is decorated can't be called

    Example:
        >>> import torch
        >>> import paceline
        >>> @paceline.register_optimizer("plain", state_per_param=0, elementwise=True)
        ... def plain(params, settings, lr, *, decay=0.0):
        ...     return torch.optim.SGD(params.groups, lr=lr, weight_decay=decay)
        >>> trainer = paceline.Trainer(
        ...     torch.nn.Linear(2, 1), {"name": "plain", "lr": 0.1}, criterion=torch.nn.MSELoss(), run=False, quiet=True
        ... )
        >>> type(trainer.optimizer).__name__
        'SGD'
    """
    facts = OptimizerFacts(state_per_param=state_per_param, elementwise=elementwise, needs_full=needs_full)
    add = OPTIMIZERS.implement(name)
    OPTIMIZERS.declare(name, facts)
    return add


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
    hidden_ids = {id(parameter) for _, parameter in hidden}
    rest = [(name, parameter) for name, parameter in params.named if id(parameter) not in hidden_ids]
    if not hidden:
        raise TrainError(
            "no-such-optimizer", f"muon found no hidden matrices in the model {type(params.model).__name__}."
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
    """Weight decay applies to matrices only, not to norms and biases."""
    if weight_decay == 0.0:
        return [{"params": named, "weight_decay": 0.0}]
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Initialize momentum buffers with zeros, which does not change the first step.

    torch's fused SGD leaves its buffers uninitialized if the first step is skipped (fp16, nonfinite), and would use
    their contents in the second one.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            if group["fused"] and group["momentum"] and not group["dampening"]:
                for parameter in group["params"]:
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def reset_state(optimizer: torch.optim.Optimizer) -> None:
    """Reset to the state before the first step."""
    optimizer.state.clear()  # in place, because MuonAdamW shares it with its parts
    if isinstance(optimizer, torch.optim.Adagrad):  # the only torch optimizer that creates its state in the constructor
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
    # Parameters on meta are materialized on cpu or cuda later.
    kinds = {"cpu", "cuda", "meta"}
    return all(p.is_floating_point() and p.device.type in kinds and _has_no_gaps(p) for _, p in named)


def _has_no_gaps(parameter: Tensor) -> bool:
    """Fused kernels write past a parameter with gaps in memory (some columns of a matrix), without an error."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return last < max(1, parameter.numel())
