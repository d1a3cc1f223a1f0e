"""The same recipe gives the same loss at each step, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import paceline
import tiny

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-6}


def train(recipe: dict[str, Any], world: int) -> paceline.History:
    assert paceline.dist.world() == world
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    assert trainer.world.size == world
    return trainer.train()


def worst_difference(reference: list[float], other: list[float]) -> float:
    assert len(reference) == len(other) == 20
    return max(abs(a - b) / abs(a) for a, b in zip(reference, other, strict=True))


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("batch", [12, 10])
@pytest.mark.parametrize("name", ["mlp", "vae", "gpt", "padded-gpt"])
def test_loss_is_the_same_on_one_two_three_and_four_ranks(name: str, batch: int, precision: str) -> None:
    recipe = tiny.recipe(name, batch=batch, precision=precision)
    reference = paceline.launch(train, ranks=1, recipe=recipe, world=1)
    assert sum(reference.losses[-3:]) / 3 < 0.7 * reference.losses[0]
    for world in (2, 3, 4):
        history = paceline.launch(train, ranks=world, recipe=recipe, world=world)
        assert worst_difference(reference.losses, history.losses) < TOLERANCE[precision]
        assert history.evaluations[-1]["loss"] == pytest.approx(
            reference.evaluations[-1]["loss"], rel=TOLERANCE[precision]
        )


@pytest.mark.parametrize("name", ["vae", "padded-gpt"])
def test_loss_is_the_same_with_accumulation(name: str) -> None:
    recipe = tiny.recipe(name, batch=10, accumulate=3, precision="fp64")
    reference = paceline.launch(train, ranks=1, recipe=recipe, world=1)
    for world in (2, 3, 4):
        history = paceline.launch(train, ranks=world, recipe=recipe, world=world)
        assert worst_difference(reference.losses, history.losses) < 1e-9


def test_accumulation_changes_nothing_without_noise() -> None:
    """Groups only cut the batch; the vae is left out because its noise belongs to a group."""
    whole = train(tiny.recipe("padded-gpt", batch=10, precision="fp64"), 1)
    cut = train(tiny.recipe("padded-gpt", batch=10, accumulate=3, precision="fp64"), 1)
    assert worst_difference(whole.losses, cut.losses) < 1e-9


def broken_train(recipe: dict[str, Any], world: int) -> paceline.History:
    """The mean of each rank's mean: what plain DDP does, and what the loss contract is there to prevent."""
    from paceline.train.step import Stepper

    exact = Stepper.backward

    def mean_of_means(self: Any, micro: Any, value: Any, weight: Any) -> Any:
        return exact(self, replace(micro, step_samples=max(1, micro.samples) * world), value, weight)

    Stepper.backward = mean_of_means  # type: ignore[method-assign]  # in a rank's own process
    return train(recipe, world)


@pytest.mark.parametrize("name", ["mlp", "vae", "gpt"])
def test_the_comparison_bites_when_averaging_is_broken(name: str) -> None:
    recipe = tiny.recipe(name, batch=10, precision="fp32")
    reference = paceline.launch(train, ranks=1, recipe=recipe, world=1)
    broken = paceline.launch(broken_train, ranks=3, recipe=recipe, world=3)
    assert worst_difference(reference.losses, broken.losses) > 100 * TOLERANCE["fp32"]
