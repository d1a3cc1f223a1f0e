"""`deterministic: everywhere`: the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
import tiny
from paceline import Config, Trainer
from paceline.errors import PacelineError
from worlds import launch, ranks

Result = dict[str, Any]
EVERYWHERE: dict[str, Any] = {"deterministic": "everywhere", "strategy": "ddp", "train": {"max_steps": 3}}
MLP = tiny.recipe("mlp", **EVERYWHERE, batch=26)
ACCUMULATION = {1: {}, 2: {"micro_batch": 5}, 3: {"accumulate": 7}, 4: {"micro_batch": 26}}


def recipes_for(number: int) -> dict[str, Any]:
    padded = tiny.recipe("padded-gpt", **EVERYWHERE, batch=46, clip_norm=0.05, ema=0.9)
    small = {**EVERYWHERE, "train": {"max_steps": 2}}
    recipes = {
        # The last batch of an epoch has 4 of 50 samples, fewer than slices.
        "padded-gpt": {**padded, "model": {**padded["model"], "dropout": 0.1}},
        "mlp": {**MLP, **ACCUMULATION[number]},
        "not everywhere": {**MLP, "deterministic": True},
    }
    if number < 4:
        recipes["bf16"] = tiny.recipe("gpt", **small, batch=12, precision="bf16")
        recipes["fp16"] = tiny.recipe("gpt", **small, batch=12, precision="fp16")
    return recipes


def train_all(recipes: Sequence[Mapping[str, Any]]) -> list[Result]:
    return [result_of(Trainer.from_config(Config.from_dict(recipe))) for recipe in recipes]


def result_of(trainer: Trainer, *data: Any, **ends: Any) -> Result:
    history = trainer.train(*data, **ends)
    weights = dict(trainer.state_dict())
    if trainer.config.ema is not None:
        with trainer.ema_weights():
            weights |= {f"ema {name}": value.clone() for name, value in trainer.state_dict().items()}
    losses = [{name: record.get(name) for name in ("loss", "grad_norm")} for record in history.steps]
    return {"weights": weights, "losses": losses, "evaluations": [each["loss"] for each in history.evaluations]}


def equal(first: Result, second: Result) -> bool:
    weights: dict[str, Tensor] = second["weights"]
    others = {name: value for name, value in first.items() if name != "weights"}
    same = all(torch.equal(value, weights[name]) for name, value in first["weights"].items())
    return same and others == {name: value for name, value in second.items() if name != "weights"}


def train_on(number: int) -> dict[str, Result]:
    recipes = recipes_for(number)
    return dict(zip(recipes, launch(train_all, ranks=number, recipes=list(recipes.values())), strict=True))


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, Result]:
    return train_on(1)


@pytest.mark.parametrize("number", [*(pytest.param(number, marks=pytest.mark.nightly) for number in (2, 4)), 3])
def test_weights_and_losses_are_equal_to_the_bit(number: int, on_one_rank: dict[str, Result]) -> None:
    found = {name: equal(on_one_rank[name], result) for name, result in train_on(number).items()}
    control = found.pop("not everywhere")
    assert all(found.values()), found
    assert not control, "without `everywhere` the order of sums depends on the ranks: this comparison finds nothing"


class Experts(nn.Module):
    """A sample runs one of two layers; a third is never run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = int(inputs[0, 2] > 0.4)
        return self.experts[chosen](inputs)


def train_experts() -> Result:
    model = Experts()
    trainer = tiny.classifier_trainer(
        model, deterministic="everywhere", strategy="ddp", unused_parameters="allow", optimizer={"name": "adamw"}
    )
    result = result_of(trainer, tiny.blobs(), max_steps=4)
    result["touched"] = [name for name, parameter in model.named_parameters() if trainer.optimizer.state[parameter]]
    return result


def test_parameters_that_only_some_slices_use() -> None:
    one, *others = (launch(train_experts, ranks=number) for number in (1, 3))
    assert all(equal(one, other) for other in others)
    assert one["touched"] == [f"experts.{number}.{kind}" for number in (0, 1) for kind in ("weight", "bias")]


def train_until(steps: int, run: str, resume: str | None) -> Result:
    settings = {"save_every": 2, "save_last": False, "run": run, "resume": resume, "train": {"max_steps": steps}}
    return train_all([{**MLP, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, **settings}])[0]


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = paceline.launch(train_until, ranks=1, steps=4, run=str(tmp_path / "whole"), resume=None)
    part = str(tmp_path / "part")
    paceline.launch(train_until, ranks=3, steps=2, run=part, resume=None)
    resumed = paceline.launch(train_until, ranks=2, steps=4, run=part, resume="auto")
    assert equal({"weights": whole["weights"]}, {"weights": resumed["weights"]})


def test_ranks_that_freeze_different_layers_are_refused() -> None:
    @ranks(2)
    def body() -> None:
        model = tiny.classifier()

        def freeze(record: Any) -> None:
            model[0].requires_grad_(not trainer.is_main_process)

        trainer = tiny.classifier_trainer(model, deterministic="everywhere", batch=12, callbacks=[freeze])
        with pytest.raises(PacelineError) as caught:
            trainer.train(tiny.blobs(), max_steps=4)
        assert caught.value.code == "train.requires-grad-differs"

    body()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(inputs) / self.seen


class Draws(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.noisy, self.last = nn.Linear(8, 8), layer, nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.noisy(self.first(inputs)))


class Noise(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn_like(inputs)


class IgnoredNoise(nn.Module):
    """Like the layer drop of many models, if its probability is zero."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (torch.rand([]) >= 0.0)


class DropoutOfFeatures(nn.Dropout):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.t()).t()


def code_of(work: Any) -> str | None:
    try:
        work()
    except PacelineError as error:
        return error.code
    return None


def refusals() -> dict[str, str | None]:
    settings: dict[str, Any] = {"deterministic": "everywhere", "batch": 36}  # 3 samples in a slice
    data = tiny.blobs()
    sampler = DistributedSampler(data, paceline.dist.world(), paceline.dist.rank())
    norm = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    own = nn.Sequential(nn.InstanceNorm1d(8, track_running_stats=True), nn.Linear(8, 2))
    frozen = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))

    def train(model: nn.Module | None = None, data: Any = data, **changes: Any) -> str | None:
        return code_of(lambda: tiny.classifier_trainer(model, **settings, **changes).train(data, max_steps=1))

    return {
        "batch norm": train(norm),
        "instance norm": train(own),
        "frozen batch norm": train(frozen),
        "counter": train(Counts()),
        "dropout": train(Draws(nn.Dropout(0.1))),
        "ignored noise": train(Draws(IgnoredNoise())),
        "dropout of features": train(Draws(DropoutOfFeatures(0.1))),
        "noise": train(Draws(Noise())),
        "sampler": train(data=DataLoader(data, 36 // paceline.dist.world(), sampler=sampler)),
        "fsdp": train(strategy="fsdp"),
        "custom loop": code_of(lambda: tiny.classifier_trainer(**settings).loader(data)),
    }


@pytest.mark.parametrize("number", [1, 2])
def test_what_can_not_be_the_same_is_refused_by_name(number: int) -> None:
    assert launch(refusals, ranks=number) == {
        "batch norm": "layout.everywhere-and-batchnorm",
        "instance norm": "layout.everywhere-and-batchnorm",
        "frozen batch norm": None,
        "counter": "train.everywhere-and-forward",
        "dropout": None,
        "ignored noise": None,
        "dropout of features": "train.everywhere-and-forward",
        "noise": "train.everywhere-and-forward",
        "sampler": "data.everywhere-and-shards",
        "fsdp": "layout.everywhere-and-layout" if number > 1 else None,
        "custom loop": "train.everywhere-and-loop",
    }


@ranks(2)
def test_a_nan_is_found_on_the_rank_that_has_its_sample() -> None:
    inputs, targets = tiny.blobs(24).tensors
    inputs = inputs.clone()
    inputs[20] = float("nan")
    trainer = tiny.classifier_trainer(batch=24, shuffle=False, deterministic="everywhere")
    with pytest.raises(PacelineError, match="on rank 1, samples 2") as caught:
        trainer.train(TensorDataset(inputs, targets), max_steps=2)
    assert "sample 20" in str(caught.value)
