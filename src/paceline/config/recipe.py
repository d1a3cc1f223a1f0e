"""The recipe of a run, as frozen data.

    config = Config.from_file("recipe.yaml", ["train.epochs=3"])

Top-level keys with plain values are also keyword arguments of `Trainer`. Derived values (accumulation, warm-up in
steps, …) are not part of it: `plan/` computes them, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, PrivateAttr, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from paceline.config import files, validation
from paceline.config.components import LOGGERS, METRICS, PRECISIONS, NameIn
from paceline.config.sections import (
    SHORTHANDS,
    BestSection,
    CheckpointSection,
    DataSection,
    DdpSection,
    EarlyStopSection,
    EmaSection,
    Env,
    FsdpSection,
    LaunchSection,
    LayoutSection,
    ModelSection,
    Names,
    OptimizerSection,
    PipelineSection,
    ProfileSection,
    Recompute,
    ScalerSection,
    ScheduleSection,
    Section,
    SplitSection,
    SweepSection,
    SyncSection,
    TensorSection,
    TrainSection,
    as_list,
    expand,
    path_as_text,
    short,
)
from paceline.user_code import is_own


class _SchemaGenerator(GenerateJsonSchema):
    """Names definitions like their titles: `Optimizer`, not `OptimizerSection`."""

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(re.sub(r"Section\b", "", name))


class Config(Section):
    """All settings of a run: a recipe as frozen data. Unknown keys are errors.

    Keys are attributes, and sections have attributes of their own: `config.optimizer.lr`. `paceline config keys` lists
    them all. The examples of the methods continue the one below.

    Args:
        values: the top-level keys; sections as dicts

    Raises:
        ConfigError: `config.unknown-key`, `config.bad-value`

    Example:
        >>> import paceline
        >>> config = paceline.Config.from_dict({"batch": 64, "optimizer": {"name": "sgd", "lr": 0.1}})
        >>> config.batch, config.optimizer.lr, config.precision
        (64, 0.1, 'fp32')
    """

    model: Annotated[ModelSection | None, short("model")] = Field(
        None, description="name of the model, and its options"
    )
    data: Annotated[DataSection | None, short("data")] = Field(None, description="name of the dataset, and its options")
    optimizer: Annotated[OptimizerSection, short("optimizer")] = Field(
        OptimizerSection(), description="optimizer and learning rate"
    )
    schedule: Annotated[ScheduleSection, short("schedule")] = Field(
        ScheduleSection(), description="learning rate schedule"
    )
    train: TrainSection = Field(TrainSection(), description="length of training: the arguments of train()")
    launch: LaunchSection = Field(LaunchSection(), description="launch options")
    layout: LayoutSection | None = Field(None, description="number of ranks on each axis, instead of a strategy")
    ddp: DdpSection = Field(DdpSection(), description="options of DDP")
    fsdp: FsdpSection = Field(FsdpSection(), description="options of FSDP2")
    tensor: TensorSection = Field(TensorSection(), description="options of tensor parallelism")
    pipeline: PipelineSection = Field(PipelineSection(), description="options of pipeline parallelism")
    split: SplitSection = Field(SplitSection(), description="options of strategy: split")
    sync: Annotated[SyncSection | None, short("sync")] = Field(
        None, description="less communication between replicas: the name of a compression, or a section"
    )
    scaler: ScalerSection = Field(ScalerSection(), description="loss scaling of fp16")
    ema: Annotated[EmaSection | None, short("ema")] = Field(
        None, description="exponential moving average of the parameters: a decay, or a section"
    )
    save_best: Annotated[BestSection | None, short("save_best")] = Field(
        None, description="keep the checkpoint with the best evaluation: the name of a metric, or a section"
    )
    early_stop: Annotated[EarlyStopSection | None, short("early_stop")] = Field(
        None, description="stop when evaluations no longer improve: a patience, or a section"
    )
    metrics: Annotated[list[Annotated[str, NameIn(METRICS, own=True)]], BeforeValidator(as_list)] = Field(
        [], description="metrics of evaluations, by name, or module:function of your own"
    )
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="how checkpoints are saved")
    profile: Annotated[ProfileSection | None, short("profile")] = Field(None, description="profile some steps")
    sweep: SweepSection = Field(SweepSection(), description="search over many runs: paceline sweep")

    batch: PositiveInt | None = Field(None, description="samples per optimizer step, over all ranks")
    batch_per_rank: PositiveInt | None = Field(None, description="samples per step and data rank, instead of batch")
    micro_batch: PositiveInt | Literal["auto"] | None = Field(
        None, description="samples per forward; auto: the largest that fits in GPU memory"
    )
    accumulate: PositiveInt | None = Field(None, description="micro-batches per optimizer step on one data rank")

    strategy: Literal["auto", "single", "dp", "ddp", "fsdp", "hsdp", "tp", "pp", "split"] = Field(
        "auto", description="a predefined layout"
    )
    blocks: Names | None = Field(None, description="modules to shard, recompute and compile; default: inferred")
    recompute: Recompute = Field("off", description="activation checkpointing: off, full, selective, every-2, …")
    precision: Annotated[str, NameIn(PRECISIONS)] = Field("fp32", description="dtype of the computation")
    tf32: bool = Field(False, description="use TF32 for fp32 matrix multiplications on GPUs")
    compile: bool | Literal["blocks", "model"] = Field(False, description="torch.compile blocks (true), or the model")
    channels_last: bool = Field(False, description="images and convolution weights in memory as NHWC")
    graph: bool = Field(False, description="replay steps as CUDA graphs: one GPU, batches of equal shapes")
    deterministic: bool | Literal["everywhere"] = Field(
        False, description="bitwise reproducible results; everywhere: on any number of ranks as well; slower"
    )
    slices: PositiveInt = Field(12, description="slices of a batch, with deterministic: everywhere")
    dropout: Literal["by-sample", "exact", "per-rank"] = Field(
        "by-sample", description="by-sample: equal masks on any layout; exact: in attention on GPUs too, but slower"
    )
    preflight: bool = Field(True, description="check all ranks with a step of weight zero before the first step")
    unused_parameters: Literal["error", "allow"] = Field("error", description="parameters without gradient")
    sync_batchnorm: bool = Field(True, description="compute batch norm statistics over all ranks")
    nonfinite: Literal["raise", "skip", "stop"] = Field("raise", description="action on a non-finite loss or gradient")
    seed: int = Field(0, ge=0, description="seed of initialization, shuffling and noise")
    clip_norm: PositiveFloat | None = Field(None, description="maximum gradient norm")
    clip_value: PositiveFloat | None = Field(
        None, description="maximum absolute value of a gradient element; applied before `clip_norm`"
    )
    scheduler_interval: Literal["epoch", "step"] = Field("epoch", description="when torch schedulers step")
    shuffle: bool = Field(True, description="shuffle the samples in every epoch")
    workers: int = Field(0, ge=0, description="data loading processes per rank")

    device: str | int | None = Field(None, description="cpu, cuda, cuda:1 or a GPU index; default: a GPU if available")
    backend: Literal["nccl", "gloo", "mpi"] | None = Field(None, description="default: nccl on GPU, gloo on CPU")
    timeout: PositiveFloat = Field(600.0, description="timeout of collectives in seconds; first step: 30 minutes")
    port: int | None = Field(None, ge=1, le=65535, description="default: a free port on one node, 29500 on several")
    fallback: bool = Field(False, description="if distributed initialization fails, use gloo or a single rank")
    env: Env = Field({}, description="environment variables of every rank")

    run: Annotated[str | bool | None, BeforeValidator(path_as_text)] = Field(
        None, description="name or path of the run folder; false: no files are written"
    )
    log_every: PositiveInt = Field(10, description="steps between log points")
    quiet: bool = Field(False, description="show warnings and errors only")
    eval_every: PositiveInt | None = Field(None, description="steps between evaluations; default: once per epoch")
    save_every: PositiveInt | None = Field(None, description="steps between checkpoints")
    save_minutes: PositiveFloat | None = Field(None, description="minutes between checkpoints")
    save_last: bool = Field(True, description="save a checkpoint at the end, if there is a run folder")
    keep: PositiveInt | None = Field(3, description="number of newest checkpoints to keep; None: all")
    keep_best: PositiveInt = Field(1, description="number of best checkpoints to keep in addition, with save_best")
    keep_every: PositiveInt | None = Field(None, description="also keep checkpoints at multiples of this step")
    init_from: Annotated[str | None, BeforeValidator(path_as_text)] = Field(
        None, description="initial weights: a run, a checkpoint, or a file of weights (.safetensors, .pt)"
    )
    code: Annotated[str | None, BeforeValidator(path_as_text)] = Field(
        None, description="folder of the modules that module:function names; default: the recipe's"
    )
    resume: str | None = Field(None, description="auto: newest run of that name; or the path of a run or checkpoint")
    loggers: Annotated[list[Annotated[str, NameIn(LOGGERS)]], BeforeValidator(as_list)] = Field(
        [], description="where to log metrics in addition to metrics.jsonl"
    )

    tags: Names = Field([], description="words to find the run by in the list of paceline watch")
    report: bool = Field(False, description="write report.html, a page about the run, to its folder when it ends")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    # By section: options of the component that an override of its name has replaced.
    _inherited: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a YAML or TOML recipe, then apply `key=value` overrides.

        Args:
            path: of the file
            overrides: such as `"train.epochs=3"`, as on the command line

        Returns:
            The recipe.

        Raises:
            ConfigError: `config.missing-file`, `config.malformed`, `config.unknown-key`, `config.bad-value`,
                `config.bad-override`

        Example:
            >>> from pathlib import Path
            >>> _ = Path("recipe.yaml").write_text("batch: 64")
            >>> paceline.Config.from_file("recipe.yaml", ["train.epochs=3"]).train.epochs
            3
        """
        values, lines = files.read(Path(path))
        return cls._merged(values, overrides, str(path), lines, str(Path(path).parent))

    @classmethod
    def default(cls, overrides: Sequence[str] = ()) -> Config:
        """The default recipe: a small GPT on the source of the standard library.

        Args:
            overrides: such as `"train.epochs=3"`

        Returns:
            The recipe that `paceline train` runs without a file.

        Raises:
            ConfigError: `config.bad-override`, `config.unknown-key`, `config.bad-value`

        Example:
            >>> paceline.Config.default(["batch=8"]).model.name
            'gpt'
        """
        path = Path(__file__).with_name("default.yaml")
        return cls.from_dict(files.read(path)[0], overrides, origin="the default recipe")

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str = "the caller"
    ) -> Config:
        """Create a Config from plain values, then apply `key=value` overrides.

        Args:
            values: the keys of a recipe, as read from YAML
            overrides: such as `"train.epochs=3"`
            origin: where the values come from, for errors

        Returns:
            The recipe.

        Raises:
            ConfigError: `config.unknown-key`, `config.bad-value`, `config.bad-override`

        Example:
            >>> paceline.Config.from_dict({"ema": 0.999}, ["batch=8"]).ema.decay
            0.999
        """
        return cls._merged(values, overrides, origin, {})

    @classmethod
    def _merged(
        cls,
        values: Mapping[str, Any],
        overrides: Sequence[str],
        origin: str,
        lines: Mapping[str, int],
        folder: str | None = None,
    ) -> Config:
        """`lines`: the line of each dotted key in the file that `origin` names; `folder`: the one that it is in."""
        merged, origins = files.merge(values, overrides, origin, SHORTHANDS, lines)
        inherited = files.inherited_options(values, merged, origins)
        for key, inner in SHORTHANDS.items():
            expanded = expand(key, merged.get(key))
            if isinstance(expanded, dict) and not isinstance(merged[key], Mapping):
                merged[key], origins[f"{key}.{inner}"] = expanded, origins.pop(key)
        # `train:` without a value is an empty section.
        merged = {key: {} if value is None and key in _SECTIONS else value for key, value in merged.items()}
        config = cls.__new__(cls)
        try:
            Section.__init__(config, **merged)  # not Config's, which has no origins
        except ValidationError as error:
            raise validation.explain(error, cls, origins) from None
        if folder is not None and config.code is None and any(map(is_own, config.names)):
            config = config.model_copy(update={"code": folder})
            origins["code"] = "the folder of the recipe"
        config._origins.update(origins)
        config._inherited.update(inherited)
        return config

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise validation.explain(error, type(self), {}) from None

    @property
    def fixed_order(self) -> bool:
        """Whether gradients are added in an order that does not depend on the number of ranks."""
        return self.deterministic == "everywhere"

    @property
    def names(self) -> list[str]:
        """Of the model, the dataset and the metrics."""
        return [*(section.name for section in (self.model, self.data) if section is not None), *self.metrics]

    @property
    def inherited(self) -> Mapping[str, list[str]]:
        """By section (`model`, `data`): the options in the file that belong to another component than the one that an
        override names."""
        return self._inherited

    def origin(self, key: str) -> str:
        """The origin of a dotted key's value.

        Args:
            key: such as `"optimizer.lr"`

        Returns:
            A file with its line, an override, or "default".

        Example:
            >>> config.origin("batch"), config.origin("seed")
            ('the caller', 'default')
        """
        return self._origins.get(key, "default")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of recipes, for editors. `paceline config schema` prints it.

        Returns:
            The schema, as plain values.

        Example:
            >>> paceline.Config.json_schema()["properties"]["batch"]["description"]
            'samples per optimizer step, over all ranks'
        """
        return cls.model_json_schema(schema_generator=_SchemaGenerator)

    def to_dict(self) -> dict[str, Any]:
        """The effective recipe as plain values: saved in the run folder and compared across ranks.

        Returns:
            All keys, with their defaults.

        Example:
            >>> config.to_dict()["optimizer"]["name"]
            'sgd'
        """
        return self.model_dump()


_SECTIONS = {name for name, field in Config.model_fields.items() if isinstance(field.default, Section)}


def with_sections(config: Config, sections: Mapping[str, Any]) -> Config:
    """A copy with other sections, in which no option is `inherited`."""
    copy = config.model_copy(update=dict(sections))
    copy._inherited = {}
    return copy


def effective(config: Config) -> str:
    """YAML of the config, with the origin of each value as a comment."""
    lines = list(_lines(config.to_dict(), config))
    width = max(len(text) for text, origin in lines if origin)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def _lines(values: Mapping[str, Any], config: Config, path: str = "") -> Iterator[tuple[str, str]]:
    indent = "  " * path.count(".")
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_scalar(key)}:", ""
            yield from _lines(value, config, f"{path}{key}.")
        else:
            yield f"{indent}{_scalar(key)}: {_scalar(value)}", config.origin(f"{path}{key}")


def _scalar(value: Any) -> str:
    text = yaml.dump(value, Dumper=files.Dumper, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()
