"""Refuses optimizers, LR schedulers and parameters that the Trainer or a layout does not support, with a name instead
of an error of a kernel.

In a pipeline, each stage has an optimizer for its own parameters. That is right if the update of a parameter depends on
that parameter alone. For a class that is not known, this is tried: two small parameters are updated together and
separately. Schedulers are checked for whether they can be stepped and saved, and count epochs or optimizer steps.
"""

from __future__ import annotations

import inspect
import traceback
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from paceline.config.components import OptimizerFacts, optimizer_facts
from paceline.config.recipe import Config
from paceline.errors import LayoutError, TrainError
from paceline.log import Log
from paceline.plan.layout import Degrees
from paceline.runtime.rng import preserve_rng_state
from paceline.text import listed

_STEPS = 2
_SHOWN = 8
_OVERLAPS = 1  # torch's number for a tensor with several elements in one place


def require_initialized(model: nn.Module) -> None:
    """For every layout: before anything reads shapes."""
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise TrainError("lazy-parameters", f"Not initialized yet: {listed(lazy)}.")
    expanded = [name for name, p in model.named_parameters() if torch._debug_has_internal_overlap(p) == _OVERLAPS]
    if expanded:
        raise TrainError("expanded-parameter", f"Several elements share one place in memory: {listed(expanded)}.")


def require_replicated_criterion(criterion: nn.Module | None, config: Config, degrees: Degrees) -> None:
    parameters = () if criterion is None else criterion.named_parameters()
    names = [name for name, parameter in parameters if parameter.requires_grad]
    if names and not (degrees.is_replicated and not config.fixed_order and config.sync is None):
        raise LayoutError(
            "criterion-parameters",
            f"{type(criterion).__name__} has trainable parameters of its own: {', '.join(names[:4])}.",
        )


def require_supported(model: nn.Module, config: Config, degrees: Degrees) -> None:
    """For the layout of this run."""
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse and (degrees.world > 1 or config.fixed_order):
        raise LayoutError(
            "sparse-gradients",
            f"Sparse gradients are not supported on several ranks or with deterministic: everywhere: {listed(sparse)}.",
        )
    if sparse and (config.clip_norm is not None or config.clip_value is not None or config.nonfinite != "raise"):
        raise TrainError(
            "sparse-clipping",
            f"Gradients of {listed(sparse)} are sparse, but clip_norm, clip_value or nonfinite needs their norm.",
        )
    norms = [name for name, part in model.named_modules() if _keeps_statistics(part, model)]
    if norms and config.fixed_order:
        raise LayoutError(
            "everywhere-and-batchnorm",
            f"deterministic: everywhere does not support layers with statistics over samples: {listed(norms)}.",
        )
    shared = [] if degrees.is_replicated else _sharing_memory(list(model.named_parameters()))
    if shared:
        raise LayoutError("shared-memory", f"Different parameters share memory: {listed(shared)}.")


def _keeps_statistics(module: nn.Module, model: nn.Module) -> bool:
    """A batch norm that is not frozen, or an instance norm with running statistics."""
    kept = isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.running_mean is not None)
    return kept and (module.training or not model.training)


def _sharing_memory(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Parameters of which some elements are in the same place as those of another."""
    storages: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in named:
        if tensor.device.type != "meta" and tensor.numel():
            storages[tensor.untyped_storage().data_ptr()].append((name, tensor))
    found = []
    for members in storages.values():
        spans = sorted(((_span(tensor), name, tensor) for name, tensor in members), key=lambda each: each[:2])
        for ((_, stop), name, tensor), ((start, _), other, second) in pairwise(spans):
            if start < stop and _overlap(tensor, second):
                found += [name, other]
    return list(dict.fromkeys(found))


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the one after the last, in the storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _overlap(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype:
        return True
    length = max(_span(first)[1], _span(second)[1]) // first.element_size()
    places = torch.zeros(length, dtype=torch.uint8)
    for tensor in (first, second):
        places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).add_(1)
    return int(places.max()) > 1


def check_optimizer(optimizer: Any) -> None:
    """Refuse unsupported optimizers before anything is built."""
    if isinstance(optimizer, torch.optim.Optimizer):
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise needs_closure(optimizer)
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, (list, tuple, set)):
        raise TrainError("several-optimizers", f"Expected one optimizer, got {len(optimizer)}.")
    is_class = isinstance(optimizer, type)
    made = f"create it: torch.optim.{optimizer.__name__}(model.parameters(), lr=…)" if is_class else "pass an optimizer"
    raise TrainError(
        "not-an-optimizer",
        f"Expected a torch.optim.Optimizer, got {'the class ' if is_class else ''}"
        f"{(optimizer if is_class else type(optimizer)).__name__}.",
        fix=f'{made}, or settings: optimizer={{"name": "adamw", "lr": 1e-3}}',
    )


def check_parameters(named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, log: Log) -> None:
    """Report the trainable parameters that the optimizer does not hold. Foreign parameters are an error."""
    trainable = {id(parameter): name for name, parameter in named if parameter.requires_grad}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for parameter, name in trainable.items() if parameter not in held]
    foreign = held - {id(parameter) for _, parameter in named}
    if foreign:
        raise TrainError(
            "other-parameters",
            f"The optimizer holds {len(foreign)} parameters that do not belong to the model, and lacks "
            f"{', '.join(missing[:_SHOWN])}{', …' if len(missing) > _SHOWN else ''}.",
        )
    if missing:
        log.warning(
            f"optimizer: these trainable parameters are not updated: {', '.join(missing)}; create the optimizer after "
            "requires_grad_(True), or freeze them with requires_grad_(False)"
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> TrainError:
    return TrainError(
        "needs-closure", f"{type(optimizer).__name__}.step() needs a closure that evaluates the loss again."
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


def check_scheduler(scheduler: Any) -> None:
    """Refuse what is not a scheduler. Any object with the methods of torch's is one."""
    if scheduler is None or isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    needed = ("step", "state_dict", "load_state_dict")
    missing = [name for name in needed if not callable(getattr(scheduler, name, None))]
    if isinstance(scheduler, type) or missing:
        got = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else f"a {type(scheduler).__name__}"
        raise TrainError(
            "not-a-scheduler",
            f"Expected a scheduler, got {got}" + (f" without {', '.join(missing)}." if missing else "."),
            why="it is stepped by the Trainer, and saved in checkpoints",
            fix="pass an instance of a torch scheduler, e.g. LambdaLR(optimizer, function), or an object with step(), "
            'state_dict() and load_state_dict(); a name is a schedule: schedule="cosine"',
        )
    required = _required(scheduler.step)
    if required:
        raise TrainError(
            "not-a-scheduler",
            f"{type(scheduler).__name__}.step() requires the argument {required[0]!r}.",
            why="the Trainer calls it without arguments, once per epoch or per optimizer step",
            fix="pass an object whose step() counts itself; torch's ReduceLROnPlateau gets the metric of evaluations",
        )


def _required(step: Any) -> list[str]:
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of a C extension
        return []
    return [each.name for each in parameters if each.default is each.empty and "VAR" not in each.kind.name]


def interval_problem(scheduler: Any, interval: str, epochs: int | None, steps: int | None) -> str:
    """Why a scheduler seems to be counted in the other unit than it is stepped in; empty if it does not.

    `epochs` and `steps` are the length of the run, as far as known.
    """
    total, in_steps = _length(scheduler)
    if interval == "step":
        if total and not in_steps and steps and total == epochs and steps > epochs:
            return f"its length of {total} is the number of epochs; set scheduler_interval='epoch'"
        return ""
    counts_steps = total and (total == steps if epochs is None else total > epochs and (in_steps or total == steps))
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    said = ["the learning rate is 0 until the end of the epoch"] if groups and not any(g["lr"] for g in groups) else []
    said += [f"its length of {total} is counted in optimizer steps"] if counts_steps else []
    return f"{' and '.join(said)}; set scheduler_interval='step'" if said else ""


def _length(scheduler: Any) -> tuple[int | None, bool]:
    """The steps of a scheduler, and whether they are optimizer steps by its own name for them."""
    total = getattr(scheduler, "total_steps", None)  # OneCycleLR
    for function in getattr(scheduler, "lr_lambdas", ()):  # of transformers: functools.partial
        total = total or getattr(function, "keywords", {}).get("num_training_steps")
    if total:
        return int(total), True
    found = getattr(scheduler, "T_max", None) or getattr(scheduler, "total_iters", None)
    return (int(found) if isinstance(found, (int, float)) else None), False
