"""The sections of a recipe, as frozen data.

Options of models and datasets are not listed here: they belong to the model or dataset that `name` picks, which
checks them when it is built, so that a model of yours needs no change in this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticKnownError, core_schema

from paceline.config import launch
from paceline.config.components import OPTIMIZERS, SCHEDULES
from paceline.registry import Registry


def as_list(value: Any) -> Any:
    """Python code writes tuples where YAML writes lists."""
    return list(value) if isinstance(value, tuple) else value


def as_section(key: str) -> Callable[[Any], Any]:
    """`ema: 0.999` is short for `ema: {decay: 0.999}`; true and false stand for the defaults and for none."""

    def read(value: Any) -> Any:
        if isinstance(value, bool):
            return {} if value else None
        return {key: value} if isinstance(value, (int, float, str)) else value

    return read


def _steps_or_fraction(value: int | float) -> int | float:
    if value >= 1 and value != int(value):
        raise ValueError("a number of steps is whole; a fraction of all steps is below 1")
    return value


def known_recompute(value: str) -> str:
    if not re.fullmatch(r"off|full|selective|every-[1-9]\d*", value):
        raise ValueError("it is off, full, selective, or every-2, every-3, …")
    return value


def number_as_text(value: Any) -> Any:
    """`OMP_NUM_THREADS: 4` means the text "4". Booleans have no spelling that all programs agree on: refused."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class NameIn:
    """A name in a registry: an enum in the JSON schema, which users' registrations extend."""

    def __init__(self, registry: Registry[Any, Any]) -> None:
        self._registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._known)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "enum": self._registry.declared}

    def _known(self, value: Any) -> str:
        names = self._registry.declared
        if not isinstance(value, str) or value not in names:
            expected = f"{', '.join(repr(name) for name in names[:-1])} or {names[-1]!r}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value


def _title(section: type) -> str:
    """In the JSON schema, which users see, `OptimizerSection` is titled `Optimizer`."""
    return section.__name__.removesuffix("Section")


class Section(BaseModel):
    """Frozen, strict (a number is not taken from a string), and closed: an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, model_title_generator=_title
    )


class NamedSection(Section):
    """A thing picked by name from a registry; every other key is an option of that thing."""

    model_config = ConfigDict(extra="allow")

    name: str

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelSection(NamedSection):
    name: str = Field(description="a registered model: gpt, mlp, resnet18, resnet20, resnet50, vae, or yours")


class DataSection(NamedSection):
    name: str = Field(description="a named dataset: stdlib-text, shapes, cifar10, or yours")


class OptimizerSection(NamedSection):
    # An optimizer that a user registers may have options of its own; a built-in one has none but these.
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    name: Annotated[str, NameIn(OPTIMIZERS)] = Field("adamw", description="fused where torch can")
    lr: PositiveFloat = Field(1e-3, description="the highest learning rate, before lr_rule")
    lr_rule: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how the learning rate follows batch / reference_batch"
    )
    reference_batch: PositiveInt | None = Field(None, description="the batch for which `lr` was chosen")
    weight_decay: float = Field(0.0, ge=0.0, description="on matrices only, not on norms and biases")
    momentum: float | None = Field(None, ge=0.0, lt=1.0, description="sgd (else 0) and muon (else 0.95)")
    betas: Annotated[list[float], BeforeValidator(as_list)] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="adam, adamw, and muon's adamw part"
    )

    @model_validator(mode="after")
    def _known_options(self) -> OptimizerSection:
        known = OPTIMIZERS.options(self.name)
        unknown = [] if known is None else [key for key in self.options() if key not in known]
        if unknown:
            errors = [
                InitErrorDetails(type="extra_forbidden", loc=(key,), input=self.options()[key]) for key in unknown
            ]
            raise ValidationError.from_exception_data("optimizer", errors)
        return self


class ScheduleSection(Section):
    name: Annotated[str, NameIn(SCHEDULES)] = Field("constant", description="the way down after the warm-up")
    unit: Literal["steps", "epochs"] = Field("steps", description="what warmup, steps, every and at are counted in")
    warmup: Annotated[int | float, AfterValidator(_steps_or_fraction)] = Field(
        0, ge=0, description="units; or, below 1, a fraction of all steps"
    )
    warmup_from: float = Field(0.0, ge=0.0, le=1.0, description="where it starts, as a fraction of the highest")
    floor: float = Field(0.0, ge=0.0, le=1.0, description="the lowest learning rate, as a fraction of the highest")
    steps: PositiveInt | None = Field(None, description="the horizon; else the epochs, else max_steps")
    every: PositiveInt | None = Field(None, description="step: multiply by factor every so many units")
    at: Annotated[list[PositiveInt], BeforeValidator(as_list)] = Field([], description="step: or at these units")
    factor: float = Field(0.1, gt=0.0, lt=1.0, description="step and plateau: what the rate is multiplied by")
    decay: float = Field(0.2, gt=0.0, le=1.0, description="wsd: the last part of the horizon, in which it falls")
    patience: int = Field(2, ge=0, description="plateau: evaluations without an improvement that are waited for")
    threshold: float = Field(1e-4, ge=0.0, description="plateau: the relative change that counts as one")
    metric: str = Field("loss", description="plateau: which number of the evaluation")
    mode: Literal["min", "max"] | None = Field(None, description="plateau: which is better; None: min for losses")


class EmaSection(Section):
    decay: float = Field(0.999, gt=0.0, lt=1.0, description="what stays of the average at each step")
    warmup: bool = Field(True, description="begin with a shorter memory: decay is at most (1 + step) / (10 + step)")


class ScalerSection(Section):
    initial: PositiveFloat = Field(65536.0, description="the first scale")
    growth: float = Field(2.0, gt=1.0, description="its factor after growth_interval steps without overflow")
    backoff: float = Field(0.5, gt=0.0, lt=1.0, description="its factor after an overflow")
    growth_interval: PositiveInt = Field(2000, description="steps")
    static: bool = Field(False, description="keep the first scale; a step that overflows is still skipped")


class DdpSection(Section):
    bucket_mb: PositiveFloat | None = Field(
        None, description="megabytes of gradients that are reduced together; torch's own: 25, the first one 1"
    )
    static_graph: bool = Field(False, description="the same parameters are used in the same order in every step")
    gradient_as_bucket_view: bool = Field(True, description="gradients lie in the buckets: one copy less")
    broadcast_buffers: bool = Field(True, description="rank 0's buffers for all before each forward")


Degree = PositiveInt | Literal["auto"]
Dtype = Literal["fp32", "bf16", "fp16"]


class LayoutSection(Section):
    """Ranks on each axis. `auto` is what the others leave of the world."""

    pipeline: Degree = Field(1, description="stages of layers")
    replicate: Degree = Field(1, description="copies of the model, which read different data")
    shard: Degree = Field(
        1, description="parts that weights and optimizer state are cut into; they read different data"
    )
    tensor: Degree = Field(1, description="parts that every layer is cut into; they read the same data")


class FsdpSection(Section):
    reshard: bool = Field(True, description="give a block's weights back after its forward, and gather them again")
    prefetch: PositiveInt = Field(1, description="blocks whose weights are gathered ahead of their turn")
    offload: bool = Field(False, description="weights, gradients and optimizer state wait in CPU memory (GPU only)")
    param_dtype: Dtype | None = Field(None, description="what weights travel in; else the precision's")
    reduce_dtype: Dtype | None = Field(None, description="what gradients are summed in; else fp32")
    output_dtype: Dtype | None = Field(None, description="what blocks return; else what they compute")
    buffer_dtype: Dtype | None = Field(None, description="what floating-point buffers are cast to; else as they are")


class TensorSection(Section):
    plan: dict[str, Literal["column", "row", "sequence", "vocabulary"]] | None = Field(
        None, description="how modules are cut, by name (* stands for one part of it); else what the model says"
    )
    sequence: bool = Field(True, description="cut activations between layers over the tokens, where the plan allows")


Balance = Annotated[list[PositiveInt] | list[str], BeforeValidator(as_list)]


class PipelineSection(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b", description="in which order micro-batches go through the stages"
    )
    microbatches: PositiveInt | None = Field(None, description="parts of a micro-batch; else twice the stages")
    stages: PositiveInt | None = Field(None, description="stages a rank holds; else 1, or 2 where interleaved")
    balance: Balance | None = Field(None, description="layers a stage, or the names at which stages begin")
    cost: Literal["memory", "time"] = Field(
        "memory", description="what stages are made even by: bytes of weights, or multiplications"
    )


class SplitSection(Section):
    devices: Annotated[list[str], BeforeValidator(as_list)] | None = Field(
        None, description="where layers go, in order; else all GPUs"
    )
    balance: Balance | None = Field(None, description="layers a device, or the names at which devices begin")
    microbatches: PositiveInt = Field(1, description="parts of a micro-batch that follow each other")


class BestSection(Section):
    metric: str = Field("loss", description="which number of the evaluation")
    mode: Literal["min", "max"] | None = Field(
        None, description="which is better; None: min for names with loss, error or perplexity, else max"
    )


class CheckpointSection(Section):
    background: bool = Field(True, description="write scheduled checkpoints while training goes on")
    on_error: bool = Field(True, description="save when an exception ends training, where the state is whole")
    wait: PositiveFloat = Field(
        30.0, description="seconds that save_checkpoint waits for the other ranks, where weights are cut over them"
    )
    grace: PositiveFloat | None = Field(
        None, description="seconds that a SIGTERM leaves: a save that would take longer is not begun"
    )
    unshared: Literal["gather", "refuse"] = Field(
        "gather", description="where some nodes can't see the run folder: send what they hold to the first one, or stop"
    )


class EarlyStopSection(BestSection):
    patience: PositiveInt = Field(3, description="evaluations without an improvement")
    min_delta: float = Field(0.0, ge=0.0, description="the change that counts as one")


def _rising(steps: list[int]) -> list[int]:
    if len(steps) == 2 and steps[0] >= steps[1]:
        raise ValueError("the first step to trace comes before the one that ends the trace")
    return steps


class ProfileSection(Section):
    steps: Annotated[list[PositiveInt], BeforeValidator(as_list), AfterValidator(_rising)] = Field(
        [10, 15], min_length=2, max_length=2, description="from this step up to, not including, that one"
    )
    shapes: bool = Field(False, description="note the shapes of inputs")
    memory: bool = Field(False, description="note allocations")


class TrainSection(Section):
    epochs: PositiveInt | None = Field(None, description="passes over the data, counted from the run's beginning")
    max_steps: PositiveInt | None = Field(None, description="optimizer steps, counted from the run's beginning")


def _section_of(name: str, options: type, **own: Any) -> type[Section]:
    """A section with the options that a dataclass declares; `own` are types that a recipe writes differently."""
    made: dict[str, Any] = {}
    for field_name, (option, declared) in launch.options_of(options).items():
        kind = own.get(field_name, str | None if option.parse else declared)
        default = getattr(options, field_name)
        default = list(default) if isinstance(default, tuple) else default
        made[field_name] = (kind, Field(default, description=option.help, ge=option.ge, gt=option.gt))
    return create_model(name, __base__=Section, __module__=__name__, **made)


if TYPE_CHECKING:
    LaunchSection = launch.LaunchOptions
else:
    LaunchSection = _section_of(
        "LaunchSection",
        launch.LaunchOptions,
        nodes=Annotated[str | None, BeforeValidator(number_as_text)],
        tee=Annotated[list[NonNegativeInt], BeforeValidator(as_list)],
    )
