"""A run as frozen data: the `Config` that a recipe becomes.

    config = Config.from_file("recipe.yaml", ["train.epochs=3"])

The top-level keys that are plain values are also keywords of `Trainer`. Values that follow from others (accumulation,
warm-up in steps, …) are not here: `plan/` works them out, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, PrivateAttr, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from paceline.config import files, validation
from paceline.config.components import LOGGERS, PRECISIONS
from paceline.config.sections import (
    BestSection,
    CheckpointSection,
    DataSection,
    DdpSection,
    EarlyStopSection,
    EmaSection,
    FsdpSection,
    LaunchSection,
    LayoutSection,
    ModelSection,
    NameIn,
    OptimizerSection,
    PipelineSection,
    ProfileSection,
    ScalerSection,
    ScheduleSection,
    Section,
    SplitSection,
    TensorSection,
    TrainSection,
    as_list,
    as_section,
    known_recompute,
    number_as_text,
)


class _SchemaGenerator(GenerateJsonSchema):
    """Names definitions as they are titled: `Optimizer`, not `OptimizerSection`."""

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(re.sub(r"Section\b", "", name))


class Config(Section):
    """Everything that describes a run. Unknown keys are refused with the nearest known one."""

    model: ModelSection | None = Field(None, description="the model, by name, with its options")
    data: DataSection | None = Field(None, description="the dataset, by name, with its options")
    optimizer: OptimizerSection = Field(OptimizerSection(), description="the optimizer and its learning rate")
    schedule: ScheduleSection = Field(ScheduleSection(), description="how the learning rate moves over the steps")
    train: TrainSection = Field(TrainSection(), description="when training ends: what train() takes")
    launch: LaunchSection = Field(LaunchSection(), description="how ranks are started")
    layout: LayoutSection | None = Field(None, description="ranks on each axis, in place of a strategy")
    ddp: DdpSection = Field(DdpSection(), description="replicate: how gradients are averaged")
    fsdp: FsdpSection = Field(FsdpSection(), description="shard: how weights are cut")
    tensor: TensorSection = Field(TensorSection(), description="tensor: how layers are cut")
    pipeline: PipelineSection = Field(PipelineSection(), description="pipeline: how stages are made and run")
    split: SplitSection = Field(SplitSection(), description="split: how layers are placed over devices")
    scaler: ScalerSection = Field(ScalerSection(), description="fp16's loss scale")
    ema: Annotated[EmaSection | None, BeforeValidator(as_section("decay"))] = Field(
        None, description="an average of the weights over the steps: a decay, or a section"
    )
    save_best: Annotated[BestSection | None, BeforeValidator(as_section("metric"))] = Field(
        None, description="keep the best evaluation's checkpoint: a metric's name, or a section"
    )
    early_stop: Annotated[EarlyStopSection | None, BeforeValidator(as_section("patience"))] = Field(
        None, description="end when evaluations no longer improve: a patience, or a section"
    )
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="how checkpoints are written")
    profile: ProfileSection | None = Field(None, description="trace some steps")

    batch: PositiveInt | None = Field(None, description="samples in one optimizer step, over all ranks")
    batch_per_rank: PositiveInt | None = Field(None, description="batch / data ranks, for those who think that way")
    micro_batch: PositiveInt | Literal["auto"] | None = Field(
        None, description="samples that one data rank puts through at once; auto: as many as fit (GPU)"
    )
    accumulate: PositiveInt | None = Field(None, description="micro-batches a data rank takes in one step")

    strategy: Literal["auto", "single", "dp", "ddp", "fsdp", "hsdp", "tp", "pp", "split"] = Field(
        "auto", description="how ranks share the model: a name for a layout"
    )
    blocks: Annotated[list[str], BeforeValidator(as_list)] | None = Field(
        None, description="names of the modules that are sharded, recomputed and compiled each on its own; else found"
    )
    recompute: Annotated[str, AfterValidator(known_recompute)] = Field(
        "off", description="activations made again in the backward: off, full, selective, every-2, every-3, …"
    )
    precision: Annotated[str, NameIn(PRECISIONS)] = Field("fp32", description="what the model computes in")
    tf32: bool = Field(False, description="fp32 matrix products in tf32 on GPUs: faster, 10 bits of mantissa")
    compile: bool | Literal["blocks", "model"] = Field(
        False, description="torch.compile each block (true), or the model as a whole"
    )
    deterministic: bool = Field(False, description="the same bits twice; slower on GPUs")
    preflight: bool = Field(True, description="before the first step, a step of weight zero that checks the ranks")
    unused_parameters: Literal["error", "allow"] = Field(
        "error", description="what a trainable parameter without a gradient is on several ranks"
    )
    sync_batchnorm: bool = Field(True, description="BatchNorm's statistics over all ranks' samples")
    nonfinite: Literal["raise", "skip", "stop"] = Field("raise", description="on a NaN or infinite loss or gradient")
    seed: int = Field(0, ge=0, description="of the initial weights, the order of the data and all noise")
    clip_norm: PositiveFloat | None = Field(None, description="the largest norm that a step's gradient may have")
    clip_value: PositiveFloat | None = Field(None, description="the largest absolute value in a step's gradient")
    scheduler_interval: Literal["epoch", "step"] = Field(
        "epoch", description="when a torch scheduler given to the Trainer steps"
    )
    shuffle: bool = Field(True, description="another order of the samples in every epoch")
    workers: int = Field(0, ge=0, description="processes a rank that read data")

    device: str | int | None = Field(
        None, description="cpu, cuda, cuda:1, or a rank number; else GPU where there is one"
    )
    backend: Literal["nccl", "gloo", "mpi"] | None = Field(None, description="else nccl on GPU, gloo on CPU")
    timeout: PositiveFloat = Field(
        600.0, description="seconds a rank waits for the others; the first step gets 30 minutes"
    )
    port: int | None = Field(None, ge=1, le=65535, description="else a free one on one node, 29500 on several")
    fallback: bool = Field(False, description="go on as one rank, or on gloo, where the distributed start fails")
    env: dict[str, Annotated[str, BeforeValidator(number_as_text)]] = Field(
        {}, description="environment variables that every rank must have"
    )

    run: str | bool | None = Field(None, description="name or path of the run folder; false writes nothing")
    log_every: PositiveInt = Field(10, description="steps between two log points")
    quiet: bool = Field(False, description="no table, bar or lines; warnings and errors still show")
    eval_every: PositiveInt | None = Field(None, description="steps between two evaluations; else once an epoch")
    save_every: PositiveInt | None = Field(None, description="steps between two checkpoints")
    save_minutes: PositiveFloat | None = Field(None, description="minutes between two checkpoints")
    save_last: bool = Field(True, description="a checkpoint at the end, where there is a run folder")
    keep: PositiveInt | None = Field(3, description="newest checkpoints that stay; None: all")
    keep_best: PositiveInt = Field(1, description="best ones that stay beside them, with save_best")
    keep_every: PositiveInt | None = Field(None, description="steps whose multiples stay for ever")
    resume: str | None = Field(
        None, description="auto: go on with the newest run of that name; or the folder of a run or a checkpoint"
    )
    loggers: Annotated[list[Annotated[str, NameIn(LOGGERS)]], BeforeValidator(as_list)] = Field(
        [], description="further places for the metrics, beside metrics.jsonl"
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a YAML or TOML recipe, then apply `key=value` overrides."""
        return cls.from_dict(files.read(Path(path)), overrides, origin=str(path))

    @classmethod
    def default(cls, overrides: Sequence[str] = ()) -> Config:
        """The embedded recipe: a small GPT on text that every machine has."""
        path = Path(__file__).with_name("default.yaml")
        return cls.from_dict(files.read(path), overrides, origin="the embedded default recipe")

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str = "the caller"
    ) -> Config:
        merged, origins = files.merge(values, overrides, origin)
        # `train:` with nothing behind it is an empty section.
        merged = {key: {} if value is None and key in _SECTIONS else value for key, value in merged.items()}
        config = cls.__new__(cls)
        try:
            Section.__init__(config, **merged)  # not our own, which knows no origins
        except ValidationError as error:
            raise validation.explain(error, cls, origins) from None
        config._origins.update(origins)
        return config

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise validation.explain(error, type(self), {}) from None

    def origin(self, key: str) -> str:
        """Where a dotted key's value came from: a file, an override, or the default."""
        return self._origins.get(key, "default")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of recipes, for editors."""
        return cls.model_json_schema(schema_generator=_SchemaGenerator)

    def to_dict(self) -> dict[str, Any]:
        """The effective recipe as plain values: what is saved in the run folder and compared between ranks."""
        return self.model_dump()


_SECTIONS = {
    "optimizer", "schedule", "train", "launch", "ddp", "fsdp", "tensor", "pipeline", "split", "scaler", "checkpoint",
}  # fmt: skip
