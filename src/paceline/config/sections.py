"""The sections of a recipe, as frozen data.

Options of models and datasets are not listed here: they belong to the model or dataset that `name` picks, which
checks them when it is built, so that a model of yours needs no change in this file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt


def _as_list(value: Any) -> Any:
    """Python code writes tuples where YAML writes lists."""
    return list(value) if isinstance(value, tuple) else value


def _steps_or_fraction(value: int | float) -> int | float:
    if value >= 1 and value != int(value):
        raise ValueError("a number of steps is whole; a fraction of all steps is below 1")
    return value


def number_as_text(value: Any) -> Any:
    """`OMP_NUM_THREADS: 4` means the text "4". Booleans have no spelling that all programs agree on: refused."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Section(BaseModel):
    """Frozen, strict (a number is not taken from a string), and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Named(Section):
    """A thing picked by name from a registry; every other key is an option of that thing."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    name: str

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Model(Named):
    name: str = Field(description="a registered model: gpt, mlp, resnet18, resnet20, resnet50, vae, or yours")


class Data(Named):
    name: str = Field(description="a named dataset: stdlib-text, shapes, cifar10, or yours")


class Optimizer(Section):
    name: Literal["sgd", "adam", "adamw"] = Field("adamw", description="fused where torch can")
    lr: PositiveFloat = Field(1e-3, description="the highest learning rate, before lr_rule")
    lr_rule: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how the learning rate follows batch / reference_batch"
    )
    reference_batch: PositiveInt | None = Field(None, description="the batch for which `lr` was chosen")
    weight_decay: float = Field(0.0, ge=0.0, description="on matrices only, not on norms and biases (adam, adamw)")
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="sgd only")
    betas: Annotated[list[float], BeforeValidator(_as_list)] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="adam and adamw"
    )


class Schedule(Section):
    name: Literal["constant", "linear", "cosine"] = Field("constant", description="the way down after the warm-up")
    warmup: Annotated[int | float, AfterValidator(_steps_or_fraction)] = Field(
        0, ge=0, description="steps; or, below 1, a fraction of all steps"
    )
    floor: float = Field(0.0, ge=0.0, le=1.0, description="the last learning rate, as a fraction of the highest")
    steps: PositiveInt | None = Field(None, description="the horizon; else the epochs, else max_steps")


class Train(Section):
    epochs: PositiveInt | None = Field(None, description="passes over the data, counted from the run's beginning")
    max_steps: PositiveInt | None = Field(None, description="optimizer steps, counted from the run's beginning")


class Launch(Section):
    ranks: PositiveInt | None = Field(None, description="number of processes; without it all GPUs, else 2 CPU ranks")
