"""Checks of LR schedulers that the user passes: whether the Trainer can step and save them, and whether they are
counted in epochs or in optimizer steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from paceline.errors import TrainError


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
