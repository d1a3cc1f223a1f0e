"""The sections of a recipe, as frozen data.

Options of models and datasets are not listed here: they belong to the model or dataset that `name` picks, which
checks them when it is built, so that a model of yours needs no change in this file.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class Section(BaseModel):
    """Frozen, strict (a number is not taken from a string), and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Named(Section):
    """A thing picked by name from a registry; every other key is an option of that thing."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Model(Named):
    name: str = Field("gpt", description="a registered model: gpt, mlp, resnet18, resnet20, resnet50, vae, or yours")


class Data(Named):
    name: str = Field("stdlib-text", description="a named dataset: stdlib-text, shapes, cifar10, or yours")


class Optimizer(Section):
    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    lr_rule: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how the learning rate follows batch / reference_batch"
    )
    reference_batch: PositiveInt | None = Field(None, description="the batch for which `lr` was chosen")
    weight_decay: float = Field(0.0, ge=0.0)
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="sgd only")
    betas: list[float] = Field([0.9, 0.999], min_length=2, max_length=2, description="adam and adamw")


class Schedule(Section):
    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int | float = Field(0, ge=0, description="steps; or, below 1, a fraction of all steps")
    floor: float = Field(0.0, ge=0.0, le=1.0, description="the last learning rate, as a fraction of the highest")
    steps: PositiveInt | None = Field(None, description="the horizon; else the epochs, else max_steps")


class Train(Section):
    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None


class Launch(Section):
    ranks: PositiveInt | None = Field(None, description="number of processes; without it all GPUs, else 2 CPU ranks")
