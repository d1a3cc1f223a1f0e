"""Refuses optimizers that a layout does not support.

In a pipeline, each stage has an optimizer for its own parameters. That is right if the update of a parameter depends on
that parameter alone. For a class that is not known, this is tried: two small parameters are updated together and
separately.
"""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import torch
from torch import Tensor

from paceline.config.components import OptimizerFacts, optimizer_facts
from paceline.errors import LayoutError, TrainError
from paceline.log import Log
from paceline.runtime.rng import preserve_rng_state

_STEPS = 2


def check_optimizer(optimizer: Any) -> None:
    """Refuse unsupported optimizers before anything is built."""
    if isinstance(optimizer, torch.optim.Optimizer):
        # Of the class: a scheduler replaces the method of the object.
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
        if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters):
            raise needs_closure(optimizer)
        return
    if optimizer is None:
        return
    if isinstance(optimizer, (list, tuple, set)):
        raise TrainError(
            "several-optimizers",
            f"Expected one optimizer, got {len(optimizer)}.",
            why="clipping, the schedule and skipped steps apply to all parameters of a model at once",
            fix="use one optimizer with parameter groups; for adversarial training, use two Trainers in a custom loop, "
            "as docs/guides/trainer.md shows",
        )
    is_class = isinstance(optimizer, type)
    made = f"create it: torch.optim.{optimizer.__name__}(model.parameters(), lr=…)" if is_class else "pass an optimizer"
    raise TrainError(
        "not-an-optimizer",
        f"Expected a torch.optim.Optimizer, got {'the class ' if is_class else ''}"
        f"{(optimizer if is_class else type(optimizer)).__name__}.",
        fix=f'{made}, or settings: optimizer={{"name": "adamw", "lr": 1e-3}}',
    )


def needs_closure(optimizer: torch.optim.Optimizer) -> TrainError:
    return TrainError(
        "needs-closure",
        f"{type(optimizer).__name__}.step() needs a closure that evaluates the loss again.",
        why="a step is one pass over its micro-batches, on all ranks at the same time, and calls step() without one",
        fix="use another optimizer; or one whose step() works without a closure",
    )


def asks_for_closure(error: Exception) -> bool:
    """Whether `step()` failed at a line about its closure, which is None."""
    return "closure" in f"{error} {traceback.extract_tb(error.__traceback__)[-1].line}"


def require_separable(optimizer: torch.optim.Optimizer, facts: OptimizerFacts | None, log: Log) -> None:
    """Refuse an optimizer for a pipeline if its update of a parameter depends on others. `facts`: as registered."""
    kind = type(optimizer)
    facts = facts or optimizer_facts([(each.__module__, each.__name__) for each in kind.__mro__])
    if facts.elementwise:
        return
    try:
        with preserve_rng_state():
            coupled = _couples_parameters(optimizer)
    except Exception as error:  # of a class that we know nothing about
        log.warning(
            f"optimizer: {kind.__name__} could not be tried on two small parameters ({type(error).__name__}: {error}); "
            "in a pipeline, each stage updates its parameters alone, which differs from one process if the update of a "
            "parameter depends on others (a global norm)"
        )
        return
    if coupled:
        raise LayoutError(
            "optimizer-couples-parameters",
            f"{kind.__name__} updates a parameter differently if it holds another one as well (a global norm?).",
            why="in a pipeline, the optimizer of a stage holds the parameters of that stage only",
            fix='use strategy="ddp" or fsdp, or set clip_norm, which is computed over all stages',
        )


def _couples_parameters(optimizer: torch.optim.Optimizer) -> bool:
    together = _updated(optimizer, [0, 1])
    separately = [_updated(optimizer, [number])[0] for number in (0, 1)]
    return not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(together, separately, strict=True))


def _updated(optimizer: torch.optim.Optimizer, numbers: list[int]) -> list[Tensor]:
    """Fixed parameters after some steps of an optimizer with the same settings."""
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    device = optimizer.param_groups[0]["params"][0].device
    parameters = [torch.nn.Parameter((torch.arange(6.0, device=device) + number).view(2, 3)) for number in numbers]
    trial = type(optimizer)(parameters, **settings)
    for step in range(_STEPS):
        torch.manual_seed(step)
        for number, parameter in zip(numbers, parameters, strict=True):
            parameter.grad = torch.linspace(-1.0, 2.0, 6, device=device).view(2, 3) * (1.0 + 10.0 * number + step)
        trial.step()
    return [parameter.detach() for parameter in parameters]
