"""Facts about optimizers, precisions, LR schedules, loggers and metrics, available without importing torch.

The planner, the validation of recipes and the parity test use them. The components are implemented in `optim/`,
`precision/`, `monitor/` and `models/`, with `@REGISTRY.implement(name)`. A test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from paceline.errors import TrainError
from paceline.registry import Registry
from paceline.user_code import is_own


@dataclass(frozen=True)
class OptimizerFacts:
    """`classes` are class names in `torch.optim` or in `paceline.optim`."""

    classes: tuple[str, ...] = ()
    state_per_param: int = 2  # state tensors of the shape of the parameter
    momentum_state: int = 0  # additional ones if `optimizer.momentum` is set
    elementwise: bool = False  # the update of an element depends on that element only, so shards can be updated alone
    needs_full: bool = False  # needs full matrices, so sharded parameters are not supported


@dataclass(frozen=True)
class PrecisionFacts:
    param_bytes: int  # per element of a parameter, its gradient and each optimizer state tensor
    gather_bytes: int  # per element of a gathered parameter
    loss_scaling: bool
    parity_bound: float  # maximum relative difference between layouts due to rounding


@dataclass(frozen=True)
class ScheduleFacts:
    needs_horizon: bool  # the learning rate depends on the total number of steps


@dataclass(frozen=True)
class LoggerFacts:
    extra: str | None = None  # the extra of paceline that installs its dependencies


@dataclass(frozen=True)
class MetricFacts:
    needs: str  # what it is computed from, for errors


# The implementation of an optimizer takes (params, settings, lr), that of a logger (run, settings).
OPTIMIZERS: Registry[OptimizerFacts, Any] = Registry(
    "optimizer", error=TrainError, hint="@paceline.register_optimizer", skip=3
)
OPTIMIZERS.declare("sgd", OptimizerFacts(("SGD",), state_per_param=0, momentum_state=1, elementwise=True))
OPTIMIZERS.declare("adam", OptimizerFacts(("Adam",), state_per_param=2, elementwise=True))
OPTIMIZERS.declare("adamw", OptimizerFacts(("AdamW",), state_per_param=2, elementwise=True))
OPTIMIZERS.declare("adafactor", OptimizerFacts(("Adafactor",), state_per_param=0, needs_full=True))
OPTIMIZERS.declare("muon", OptimizerFacts(("Muon", "MuonAdamW"), state_per_param=1, needs_full=True))

# torch optimizers without a name in a recipe; users pass them as objects.
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

LOGGERS: Registry[LoggerFacts, Any] = Registry("logger", error=TrainError, hint="@paceline.register_logger", skip=2)
LOGGERS.declare("csv", LoggerFacts())
LOGGERS.declare("tensorboard", LoggerFacts(extra="tensorboard"))
LOGGERS.declare("wandb", LoggerFacts(extra="wandb"))
LOGGERS.declare("mlflow", LoggerFacts(extra="mlflow"))

_CLASSES = "logits of shape (…, classes) or (samples, classes, …), and integer targets of shape (…)"
_VALUES = "outputs and targets of the same shape, both floating point"
METRICS: Registry[MetricFacts, Any] = Registry("metric", error=TrainError, hint="Trainer(metrics={name: function})")
METRICS.declare("accuracy", MetricFacts(_CLASSES))
METRICS.declare("top5_accuracy", MetricFacts(f"{_CLASSES}, of at least 5 classes"))
METRICS.declare("perplexity", MetricFacts(_CLASSES))
METRICS.declare("mse", MetricFacts(_VALUES))
METRICS.declare("rmse", MetricFacts(_VALUES))
METRICS.declare("mae", MetricFacts(_VALUES))


def optimizer_facts(bases: list[tuple[str, str]]) -> OptimizerFacts:
    """Facts about an optimizer, given (module, name) of its class and its base classes, in MRO order.

    A subclass may override the update, so only `needs_full` is inherited.
    """
    named = [OPTIMIZERS.facts(name) for name in OPTIMIZERS.declared]
    known = {each: facts for facts in (*named, *TORCH_OPTIMIZERS) for each in facts.classes}
    found = [known.get(name) if module.split(".")[0] in ("torch", "paceline") else None for module, name in bases]
    if found and found[0] is not None:
        return found[0]
    return OptimizerFacts(needs_full=any(facts is not None and facts.needs_full for facts in found))


_SMALLER = ("loss", "error", "perplexity", "mse", "mae")


def smaller_is_better(metric: str) -> bool:
    """Whether a metric of that name is usually minimized. Names may have a prefix, such as `ema_` or that
    of a validation set."""
    return any(word in metric.lower().rpartition("/")[2] for word in _SMALLER)


class NameIn:
    """A name in a registry: an enum in the JSON schema, which user registrations extend. `own`: or `module:name`, of
    the user's code."""

    def __init__(self, registry: Registry[Any, Any], *, own: bool = False) -> None:
        self._registry, self._own = registry, own

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._known)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        known = {"type": "string", "enum": self._registry.declared}
        return {"anyOf": [known, {"type": "string", "pattern": ".:."}]} if self._own else known

    def _known(self, value: Any) -> str:
        names = self._registry.declared
        if self._own and isinstance(value, str) and is_own(value):
            return value
        if not isinstance(value, str) or value not in names:
            expected = f"{', '.join(repr(name) for name in names[:-1])} or {names[-1]!r}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value
