"""The sections of a recipe, as frozen data.

Options of models and datasets are not listed here: they are validated by the model or dataset when it is built, so
adding one requires no change in this file.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from paceline.config import launch
from paceline.config.components import OPTIMIZERS, SCHEDULES, NameIn


def as_list(value: Any) -> Any:
    """Accept tuples from Python code as lists, and `loggers: csv` as `[csv]`."""
    return list(value) if isinstance(value, tuple) else [value] if isinstance(value, (str, int)) else value


# `ema: 0.999` is short for `ema: {decay: 0.999}`, in recipes, overrides and Trainer's keywords.
SHORTHANDS = {
    "model": "name",
    "data": "name",
    "optimizer": "name",
    "schedule": "name",
    "ema": "decay",
    "save_best": "metric",
    "early_stop": "patience",
    "profile": "steps",
    "sync": "compress",
}


def expand(name: str, value: Any) -> Any:
    """The section that a value is short for. For an optional one, true means the defaults, and false none."""
    if isinstance(value, bool) and SHORTHANDS[name] != "name":
        return {} if value else None
    short = isinstance(value, (int, float, str, list, tuple)) and not isinstance(value, bool)
    return {SHORTHANDS[name]: value} if short else value


def short(name: str) -> BeforeValidator:
    return BeforeValidator(partial(expand, name))


def _steps_or_fraction(value: int | float) -> int | float:
    if value >= 1 and value != int(value):
        raise ValueError("expected an integer number of steps, or a fraction below 1")
    return value


def _known_recompute(value: str) -> str:
    if not re.fullmatch(r"off|full|selective|every-[1-9]\d*", value):
        raise ValueError("expected off, full, selective, or every-2, every-3, …")
    return value


def _number_as_text(value: Any) -> Any:
    """Convert `OMP_NUM_THREADS: 4` to "4". Booleans are rejected, because programs spell them differently."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Names = Annotated[list[str], BeforeValidator(as_list)]
Recompute = Annotated[str, AfterValidator(_known_recompute)]
Env = dict[str, Annotated[str, BeforeValidator(_number_as_text)]]


class Section(BaseModel):
    """Frozen, strict (strings are not converted to numbers) and closed (unknown keys are errors)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False,
        model_title_generator=lambda section: section.__name__.removesuffix("Section"),  # in the JSON schema
    )  # fmt: skip


class NamedSection(Section):
    """A component selected by name from a registry; all other keys are options of the component."""

    model_config = ConfigDict(extra="allow")

    name: str

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelSection(NamedSection):
    name: str = Field(description="gpt, mlp, resnet18, resnet20, resnet50, vae, a registered one, or module:name")


class DataSection(NamedSection):
    name: str = Field("", description="stdlib-text, shapes, cifar10, a registered one, or module:name")
    sharded: bool | None = Field(None, description="whether each rank reads its own shard of a stream, or all of it")
    whole_batches: bool = Field(False, description="whether every rank reads and collates whole batches of a dataset")


class OptimizerSection(NamedSection):
    # Only optimizers registered by users have options of their own.
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    name: Annotated[str, NameIn(OPTIMIZERS)] = Field("adamw", description="uses fused kernels if torch has them")
    lr: PositiveFloat = Field(1e-3, description="base learning rate, before lr_rule is applied")
    lr_rule: Literal["none", "linear", "sqrt"] = Field("none", description="scaling of lr with batch / reference_batch")
    reference_batch: PositiveInt | None = Field(None, description="the batch size that lr was tuned for")
    weight_decay: float = Field(0.0, ge=0.0, description="applied to matrices only, not to norms and biases")
    momentum: float | None = Field(None, ge=0.0, lt=1.0, description="of sgd (default 0) and muon (default 0.95)")
    betas: Annotated[list[float], BeforeValidator(as_list)] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="of adam, adamw and the AdamW part of muon"
    )

    @model_validator(mode="after")
    def _known_options(self) -> OptimizerSection:
        known, options = OPTIMIZERS.options(self.name), self.options()
        unknown = [] if known is None else [key for key in options if key not in known]
        errors = [InitErrorDetails(type="extra_forbidden", loc=(key,), input=options[key]) for key in unknown]
        if errors:
            raise ValidationError.from_exception_data("optimizer", errors)
        return self


class ScheduleSection(Section):
    name: Annotated[str, NameIn(SCHEDULES)] = Field("constant", description="the learning rate after the warm-up")
    unit: Literal["steps", "epochs"] = Field("steps", description="unit of warmup, steps, every and at")
    warmup: Annotated[int | float, AfterValidator(_steps_or_fraction)] = Field(
        0, ge=0, description="length of the warm-up; below 1, a fraction of all steps"
    )
    warmup_from: float = Field(0.0, ge=0.0, le=1.0, description="initial learning rate, as a fraction of lr")
    floor: float = Field(0.0, ge=0.0, le=1.0, description="minimum learning rate, as a fraction of lr")
    steps: PositiveInt | None = Field(None, description="horizon; default: train.epochs, or train.max_steps")
    every: PositiveInt | None = Field(None, description="step: period of the decay")
    at: Annotated[list[PositiveInt], BeforeValidator(as_list)] = Field([], description="step: milestones of the decay")
    factor: float = Field(0.1, gt=0.0, lt=1.0, description="step, plateau: factor of the decay")
    decay: float = Field(0.2, gt=0.0, le=1.0, description="wsd: length of the decay, as a fraction of the horizon")
    patience: int = Field(2, ge=0, description="plateau: evaluations without improvement before the decay")
    threshold: float = Field(1e-4, ge=0.0, description="plateau: minimum relative improvement")
    metric: str = Field("loss", description="plateau: metric of the evaluation")
    mode: Literal["min", "max"] | None = Field(None, description="plateau: which is better; None: min for losses")


class EmaSection(Section):
    decay: float = Field(0.999, gt=0.0, lt=1.0, description="weight of the previous average in each step")
    warmup: bool = Field(True, description="limit decay to (1 + step) / (10 + step)")


class ScalerSection(Section):
    initial: PositiveFloat = Field(65536.0, description="initial loss scale")
    growth: float = Field(2.0, gt=1.0, description="factor after growth_interval steps without overflow")
    backoff: float = Field(0.5, gt=0.0, lt=1.0, description="factor after an overflow")
    growth_interval: PositiveInt = Field(2000, description="number of steps")
    static: bool = Field(False, description="keep the initial scale; steps that overflow are still skipped")


class DdpSection(Section):
    bucket_mb: PositiveFloat | Literal["auto"] | None = Field(
        None, description="bucket size in MB; auto: measured; default: 25, and 1 for the first one"
    )
    static_graph: bool = Field(False, description="every step uses the same parameters in the same order")
    gradient_as_bucket_view: bool = Field(True, description="gradients are views of the buckets, which saves a copy")
    broadcast_buffers: bool = Field(True, description="broadcast the buffers of rank 0 before each forward")


class OuterSection(Section):
    name: Literal["average", "nesterov"] = Field("average", description="local SGD: average; DiLoCo: nesterov")
    lr: PositiveFloat = Field(0.7, description="nesterov: learning rate of the outer step")
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="nesterov: momentum of the outer step")


def _outer_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class SyncSection(Section):
    """Less communication between replicas: smaller messages, or fewer."""

    compress: Literal["fp16", "bf16", "int8", "powersgd"] | None = Field(
        None, description="format in which gradients are reduced; with every, the changes of a round"
    )
    rank: PositiveInt = Field(1, description="powersgd: rank of the approximation of a matrix")
    start: NonNegativeInt = Field(0, description="powersgd: number of uncompressed steps at the beginning")
    min_ratio: float = Field(2.0, ge=1.0, description="powersgd: compress matrices by at least this factor, or not")
    warm_start: bool = Field(True, description="powersgd: start from the approximation of the previous step")
    every: PositiveInt | None = Field(None, description="steps between two averages of the replicas' weights")
    warmup: NonNegativeInt = Field(0, description="every: number of synchronous steps at the beginning")
    outer: Annotated[OuterSection, BeforeValidator(_outer_name)] = Field(
        OuterSection(), description="every: the outer optimizer"
    )

    @model_validator(mode="after")
    def _effective(self) -> SyncSection:
        """Refuse keys that have no effect. Defaults are in every effective recipe, so these are accepted."""
        unused: list[tuple[tuple[str, ...], str]] = []
        if self.compress != "powersgd":
            unused += [((key,), "compress: powersgd") for key in ("rank", "start", "min_ratio", "warm_start")]
        if self.every is None:
            unused += [(("warmup",), "every"), (("outer",), "every")]
        elif self.outer.name != "nesterov":
            unused += [(("outer", key), "outer.name: nesterov") for key in ("lr", "momentum")]
        errors = []
        for path, needed in unused:
            section: Section = self.outer if path[1:] else self
            value = getattr(section, path[-1])
            if value != type(section).model_fields[path[-1]].default:
                errors.append(_without_effect(path, value, f"sync.{needed}"))
        if not errors and self.compress is None and self.every is None:
            errors.append(_without_effect((), {}, "sync.compress or sync.every"))
        if errors:
            raise ValidationError.from_exception_data("sync", errors)
        return self


def _without_effect(path: tuple[str, ...], value: Any, needed: str) -> InitErrorDetails:
    kind = PydanticCustomError("no_effect", "has no effect without {needed}", {"needed": needed})
    shown = value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value
    return InitErrorDetails(type=kind, loc=path, input=shown)


Degree = PositiveInt | Literal["auto"]
Dtype = Literal["fp32", "bf16", "fp16"]


class LayoutSection(Section):
    """The number of ranks on each axis. `auto` takes the ranks that remain."""

    pipeline: Degree = Field(1, description="pipeline ranks, each with its own layers")
    replicate: Degree = Field(1, description="replicas of the model, which read different data")
    shard: Degree = Field(1, description="shards of parameters and optimizer state; ranks read different data")
    tensor: Degree = Field(1, description="shards of every layer; ranks read the same data")


class FsdpSection(Section):
    reshard: bool = Field(True, description="free the gathered parameters of a block after its forward")
    prefetch: PositiveInt = Field(1, description="number of blocks whose parameters are gathered in advance")
    offload: bool = Field(False, description="keep parameters, gradients and optimizer state in CPU memory (GPU only)")
    param_dtype: Dtype | None = Field(None, description="dtype of gathered parameters; default: that of precision")
    reduce_dtype: Dtype | None = Field(None, description="dtype of the gradient reduction; default: fp32")
    output_dtype: Dtype | None = Field(None, description="dtype that block outputs are cast to; default: no cast")
    buffer_dtype: Dtype | None = Field(None, description="dtype that buffers are cast to; default: no cast")


class TensorSection(Section):
    plan: dict[str, Literal["column", "row", "sequence", "vocabulary"]] | None = Field(
        None, description="sharding style by module name (* matches one component); default: the model's plan"
    )
    sequence: bool = Field(True, description="shard activations between layers by token, if the plan supports it")


Balance = Annotated[list[PositiveInt] | list[str], BeforeValidator(as_list)]


class PipelineSection(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field("1f1b", description="execution order")
    microbatches: PositiveInt | None = Field(None, description="default: 2 per pipeline rank")
    stages: PositiveInt | None = Field(None, description="stages per rank; default: 1, or 2 for interleaved")
    balance: Balance | None = Field(None, description="layers per stage, or the name of each stage's first layer")
    cost: Literal["memory", "time"] = Field("memory", description="balance stages by parameter bytes, or by FLOPs")


class SplitSection(Section):
    devices: Names | None = Field(None, description="default: all GPUs")
    balance: Balance | None = Field(None, description="layers per device, or the name of each device's first layer")
    microbatches: PositiveInt = Field(1, description="number of parts that a micro-batch is split into")


class BestSection(Section):
    metric: str = Field("loss", description="metric of the evaluation")
    mode: Literal["min", "max"] | None = Field(None, description="None: min for losses and errors, else max")


class CheckpointSection(Section):
    background: bool = Field(True, description="write scheduled checkpoints while training continues")
    on_error: bool = Field(True, description="save when an exception ends training, if the state is consistent")
    wait: PositiveFloat = Field(30.0, description="timeout of save_checkpoint for sharded parameters, in seconds")
    grace: PositiveFloat | None = Field(None, description="seconds between SIGTERM and SIGKILL, which limit a save")
    unshared: Literal["gather", "refuse"] = Field("gather", description="if the run folder is not shared by all nodes")


class EarlyStopSection(BestSection):
    patience: PositiveInt = Field(3, description="evaluations without improvement before training stops")
    min_delta: float = Field(0.0, ge=0.0, description="minimum improvement")


def _ascending(steps: list[int]) -> list[int]:
    if len(steps) == 2 and steps[0] >= steps[1]:
        raise ValueError("the first step must be smaller than the end step")
    return steps


class ProfileSection(Section):
    steps: Annotated[list[PositiveInt], BeforeValidator(as_list), AfterValidator(_ascending)] = Field(
        [10, 15], min_length=2, max_length=2, description="first step, and the step after the last one"
    )
    shapes: bool = Field(False, description="record input shapes")
    memory: bool = Field(False, description="record memory allocations")


class TrainSection(Section):
    epochs: PositiveInt | None = Field(None, description="number of epochs, including those before a resume")
    max_steps: PositiveInt | None = Field(None, description="number of steps, including those before a resume")
    pause_at: Annotated[int | float, AfterValidator(_steps_or_fraction)] | None = Field(
        None,
        gt=0,
        description="stop at this step with a checkpoint, to be resumed later; below 1, a fraction of all steps",
    )


class SweepSection(Section):
    """A search over many runs: `paceline sweep`."""

    space: dict[str, Any] = Field(
        {}, description="how keys vary: log(a, b), uniform(a, b), int(a, b), logint(a, b) or choice(a, b, …)"
    )
    trials: PositiveInt | None = Field(None, description="number of trials; default: 20, or all cells of a grid")
    parallel: PositiveInt | None = Field(None, description="trials at a time; default: as many as the GPUs allow, or 1")
    sampler: Literal["random", "grid", "tpe", "cmaes"] = Field("tpe", description="how values are chosen")
    pruner: Literal["none", "median", "asha"] = Field(
        "none", description="median: stop trials below the median; asha: continue only the best ones"
    )
    eta: Annotated[int, Field(ge=2)] = Field(2, description="asha: at each rung, one in `eta` trials continues")
    rungs: Annotated[int, Field(ge=2)] = Field(4, description="asha: number of rungs; each is eta times the one before")
    seed: NonNegativeInt = Field(0, description="seed of the sampler")
    metric: str = Field("loss", description="metric of the evaluation to optimize")
    mode: Literal["min", "max"] | None = Field(None, description="None: min for losses and errors, else max")
    minutes: PositiveFloat | None = Field(None, description="start no trial after this time")
    steps: PositiveInt | None = Field(None, description="start no trial after so many optimizer steps of all trials")
    retries: NonNegativeInt = Field(3, description="restarts of a trial after accidents, such as a lost machine")
    per_gpu: PositiveInt = Field(1, description="trials that share a GPU")
    storage: Literal["sqlite", "journal"] = Field("sqlite", description="journal: for a study on a network filesystem")


def _section_of(name: str, options: type, **own: Any) -> type[Section]:
    """A section with the options of a dataclass; `own` are the types that differ in a recipe."""
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
        nodes=Annotated[str | None, BeforeValidator(_number_as_text)],
        on_hang=launch.OnHang,
        tee=Annotated[list[NonNegativeInt], BeforeValidator(as_list)],
    )
