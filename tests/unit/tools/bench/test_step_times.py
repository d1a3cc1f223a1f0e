"""Where the time of a step goes, on one rank. `tests/ranks/test_bench_recipes.py` has several."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch

from paceline import Config
from paceline.tools.bench import step_times
from paceline.tools.bench.step_times import StepTimes, TimedTrainer
from paceline.train import recipe_objects

RECIPE = {
    "model": {"name": "mlp", "inputs": 64, "width": 16},
    "data": {"name": "shapes", "size": 8, "channels": 1, "length": 64},
    "batch": 16,
    "run": False,
    "quiet": True,
    "log_every": 2,
    "device": "cpu",
}


def trained(steps: int, **changes: object) -> TimedTrainer:
    config = Config.from_dict({**RECIPE, **changes})
    trainer = TimedTrainer.from_config(config)
    assert isinstance(trainer, TimedTrainer)
    trainer.train(recipe_objects.build_data(config)[0], max_steps=steps)
    return trainer


def test_every_step_has_its_parts_and_they_fit_into_the_time_of_training() -> None:
    began = perf_counter()
    trainer = trained(6)
    took = perf_counter() - began
    steps = trainer.times.steps()
    assert len(steps) == 5  # the last one does not return to the loader
    for step in steps:  # also those after the second one, in which `ModelFlops` counts
        assert {"data", "forward", "backward", "optimizer", "other"} <= set(step)
        assert min(step.values()) >= 0.0
    assert "logging" in steps[1] and "logging" in steps[3]
    assert sum(sum(step.values()) for step in steps) < took


def test_micro_batches_of_a_step_are_added() -> None:
    trainer = trained(3, accumulate=4)
    assert len(trainer.times.steps()) == 2


def test_training_is_the_same_as_without_timing() -> None:
    timed, plain = trained(4), Config.from_dict(RECIPE)
    trainer = step_times.Trainer.from_config(plain)
    trainer.train(recipe_objects.build_data(plain)[0], max_steps=4)
    for name, weights in trainer.model.state_dict().items():
        assert torch.equal(weights, timed.model.state_dict()[name])


def test_buckets_are_timed_against_the_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 10.0, 11.0, 15.0, 16.0])
    monkeypatch.setattr(step_times, "perf_counter", lambda: next(clock))
    times = StepTimes(torch.device("cpu"))
    for _ in range(2):
        times.note("other")
        times.bucket_ready(100)
        times.gradients_complete()
        times.note("communication")
        times.ended()
    assert times.buckets(skip=1) == [(4.0, 100)]
    assert times.buckets(skip=0) == [(3.0, 100)]
    assert times.steps() == [
        {"backward": 3.0, "communication": 1.0},
        {"other": 6.0, "backward": 5.0, "communication": 1.0},
    ]


def test_waiting_between_steps_belongs_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 50.0, 52.0, 99.0])
    monkeypatch.setattr(step_times, "perf_counter", lambda: next(clock))
    times, aligned = StepTimes(torch.device("cpu")), []
    times.align = lambda: aligned.append(True)
    times.note("other")
    for _ in range(2):
        times.note("forward")
        times.ended()
    assert times.steps() == [{"forward": 1.0}, {"forward": 2.0}] and len(aligned) == 2
