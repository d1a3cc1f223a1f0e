"""What is known about optimizers, precisions, LR schedules and loggers without importing torch.

The planner, the recipe's validation and the parity test read these facts; the code that builds each component is in
`optim/`, `precision/` and `monitor/`, under `@REGISTRY.implement(name)`. A test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.registry import Registry


@dataclass(frozen=True)
class OptimizerFacts:
    """`classes` are the names of the optimizer's classes, in `torch.optim` or in `paceline.optim`."""

    classes: tuple[str, ...] = ()
    state_per_param: int = 2  # tensors of the parameter's shape that it keeps
    momentum_state: int = 0  # further ones where `optimizer.momentum` is set
    elementwise: bool = False  # an update of an element depends on that element only: shards can be updated alone
    needs_full: bool = False  # it computes with full matrices, which no rank has where weights are sharded


@dataclass(frozen=True)
class PrecisionFacts:
    param_bytes: int  # of a parameter, its gradient and each tensor of optimizer state
    gather_bytes: int  # of a parameter while it is gathered for a forward or backward
    loss_scaling: bool
    parity_bound: float  # the largest relative difference between two layouts that is rounding


@dataclass(frozen=True)
class ScheduleFacts:
    needs_horizon: bool  # the learning rate depends on the total number of steps


@dataclass(frozen=True)
class LoggerFacts:
    extra: str | None = None  # the extra of paceline that installs what it needs


# The implementation of an optimizer takes (params, settings, lr), that of a logger (run, settings).
OPTIMIZERS: Registry[OptimizerFacts, Any] = Registry("optimizer", hint="paceline.register_optimizer", skip=3)
OPTIMIZERS.declare("sgd", OptimizerFacts(("SGD",), state_per_param=0, momentum_state=1, elementwise=True))
OPTIMIZERS.declare("adam", OptimizerFacts(("Adam",), state_per_param=2, elementwise=True))
OPTIMIZERS.declare("adamw", OptimizerFacts(("AdamW",), state_per_param=2, elementwise=True))
OPTIMIZERS.declare("adafactor", OptimizerFacts(("Adafactor",), state_per_param=0, needs_full=True))
OPTIMIZERS.declare("muon", OptimizerFacts(("Muon", "MuonAdamW"), state_per_param=1, needs_full=True))

# torch's optimizers that have no name in a recipe; users pass them as objects.
TORCH_OPTIMIZERS = (
    OptimizerFacts(("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"), elementwise=True),
    OptimizerFacts(("SparseAdam",), needs_full=True),
)

PRECISIONS: Registry[PrecisionFacts, Any] = Registry("precision")
PRECISIONS.declare("fp32", PrecisionFacts(param_bytes=4, gather_bytes=4, loss_scaling=False, parity_bound=1e-5))
PRECISIONS.declare("bf16", PrecisionFacts(param_bytes=4, gather_bytes=2, loss_scaling=False, parity_bound=5e-3))
PRECISIONS.declare("fp16", PrecisionFacts(param_bytes=4, gather_bytes=2, loss_scaling=True, parity_bound=5e-3))
PRECISIONS.declare("fp64", PrecisionFacts(param_bytes=8, gather_bytes=8, loss_scaling=False, parity_bound=1e-9))

SCHEDULES: Registry[ScheduleFacts, float] = Registry("schedule")
SCHEDULES.declare("constant", ScheduleFacts(needs_horizon=False))
SCHEDULES.declare("linear", ScheduleFacts(needs_horizon=True))
SCHEDULES.declare("cosine", ScheduleFacts(needs_horizon=True))
SCHEDULES.declare("step", ScheduleFacts(needs_horizon=False))
SCHEDULES.declare("wsd", ScheduleFacts(needs_horizon=True))
SCHEDULES.declare("plateau", ScheduleFacts(needs_horizon=False))

LOGGERS: Registry[LoggerFacts, Any] = Registry("logger", hint="paceline.register_logger", skip=2)
LOGGERS.declare("csv", LoggerFacts())
LOGGERS.declare("tensorboard", LoggerFacts(extra="tensorboard"))
LOGGERS.declare("wandb", LoggerFacts(extra="wandb"))
LOGGERS.declare("mlflow", LoggerFacts(extra="mlflow"))


def optimizer_facts(bases: list[tuple[str, str]]) -> OptimizerFacts:
    """Facts about an optimizer from the (module, name) of its class and of its base classes, in that order.

    A subclass may compute otherwise than its base, so of a base only `needs_full` is inherited.
    """
    named = [OPTIMIZERS.facts(name) for name in OPTIMIZERS.declared]
    known = {each: facts for facts in (*named, *TORCH_OPTIMIZERS) for each in facts.classes}
    found = [known.get(name) if module.split(".")[0] in ("torch", "paceline") else None for module, name in bases]
    if found and found[0] is not None:
        return found[0]
    return OptimizerFacts(needs_full=any(facts is not None and facts.needs_full for facts in found))
