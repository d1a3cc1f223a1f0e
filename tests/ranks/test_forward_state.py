"""Parameters and buffers that a forward changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from heard import heard
from paceline import dist
from paceline.errors import PacelineError
from worlds import launch, ranks


class Changing(nn.Module):
    """Calls `change` with itself and its inputs in every training forward."""

    def __init__(self, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.target, self.change = nn.Linear(8, 2), nn.Linear(8, 2).requires_grad_(False), change
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.change(self, inputs)
        outputs: Tensor = self.layer(inputs - self.mean) + self.target(inputs)
        return outputs


def warnings_of(model: nn.Module, **settings: Any) -> list[str]:
    with heard() as lines:
        tiny.classifier_trainer(model, **settings).train(tiny.blobs(), max_steps=1)
    return lines


def track(model: Any, inputs: Tensor) -> None:
    model.mean.lerp_(inputs.mean(0), 0.1)


def count(model: Any, inputs: Tensor) -> None:
    model.forwards += 1


def follow(model: Any, inputs: Tensor) -> None:
    model.target.weight.lerp_(model.layer.weight, 0.1)


def shrink(model: Any, inputs: Tensor) -> None:
    model.layer.weight.data = model.layer.weight.data * (1 - 0.01 * inputs.mean())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_buffer_that_depends_on_the_samples_of_a_rank_is_named(strategy: str) -> None:
    @ranks(2)
    def body() -> None:
        lines = warnings_of(Changing(track), strategy=strategy)
        assert [line.split(" from ")[0] for line in lines] == ["the forward computes mean"] * (dist.rank() == 0)

    body()


@ranks(2)
def test_a_buffer_that_changes_equally_is_named_only_with_several_micro_batches() -> None:
    assert warnings_of(Changing(count)) == []
    lines = warnings_of(Changing(count), accumulate=2)
    assert [line.split(",")[0] for line in lines] == ["the forward changes forwards once per micro-batch"] * (
        dist.rank() == 0
    )


def code_of(model: nn.Module, **settings: Any) -> tuple[str, str]:
    with pytest.raises(PacelineError) as caught:
        tiny.classifier_trainer(model, **settings).train(tiny.blobs(), max_steps=1)
    return caught.value.code, str(caught.value)


@ranks(2)
def test_a_forward_that_changes_parameters_is_refused() -> None:
    code, text = code_of(Changing(shrink), strategy="ddp")
    assert code == "train.forward-changes-parameters" and "layer.weight" in text
    code, text = code_of(Changing(follow), strategy="fsdp")
    assert code == "train.forward-changes-parameters" and "target.weight" in text
    embedding = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Flatten())
    assert code_of(embedding, strategy="ddp")[0] == "train.forward-changes-parameters"


@ranks(2)
def test_replicas_that_change_parameters_equally_are_allowed() -> None:
    assert warnings_of(Changing(follow), strategy="ddp") == []


def evaluations_of(**settings: Any) -> list[float]:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(2, track_running_stats=True, affine=True)
    model = nn.Sequential(nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(8, 2))
    trainer = tiny.classifier_trainer(model, precision="fp64", **settings)
    history = trainer.train(tiny.blobs(50), tiny.blobs(13, first=1), epochs=2)  # the last batch has 2 samples
    return [*history.losses, *(each["loss"] for each in history.evaluations)]


@pytest.mark.parametrize("layout", ["ddp:3", "fsdp:2"])
def test_running_statistics_of_instance_norm_are_those_of_all_ranks(layout: str) -> None:
    strategy, number = layout.split(":")
    found = launch(evaluations_of, ranks=int(number), strategy=strategy)
    assert found == pytest.approx(evaluations_of(), rel=1e-9)


def follow_in_place(model: Any, inputs: Tensor) -> None:
    model.target.weight.data.mul_(0.99).add_(model.layer.weight.data, alpha=0.01)


def follow_by_assignment(model: Any, inputs: Tensor) -> None:
    model.target.weight.data = model.target.weight.data * 0.99 + model.layer.weight.data * 0.01


def project(model: Any, inputs: Tensor) -> None:
    """Doing it again changes nothing."""
    model.target.weight.copy_((model.target.weight * 8).round() / 8)


def teacher_of(change: Callable[[Any, Tensor], object]) -> Changing:
    model = Changing(change)
    model.target.load_state_dict(model.layer.state_dict())  # a teacher begins as a copy
    return model


@ranks(2)
def test_a_sharded_teacher_is_refused_although_it_begins_equal() -> None:
    for change in (follow, follow_in_place, follow_by_assignment):
        code, text = code_of(teacher_of(change), strategy="fsdp")
        assert code == "train.forward-changes-parameters" and "target.weight" in text
    assert warnings_of(Changing(count), strategy="fsdp") == []


@pytest.mark.parametrize("world", [1, 2])
def test_a_teacher_that_every_micro_batch_moves_is_named(world: int) -> None:
    @ranks(world)
    def body() -> None:
        for change in (follow, follow_in_place, follow_by_assignment):
            lines = warnings_of(teacher_of(change), accumulate=2)
            expected = ["the forward changes target.weight once per micro-batch"] * (dist.rank() == 0)
            assert [line.split(",")[0] for line in lines] == expected
            assert warnings_of(teacher_of(change)) == []
        assert warnings_of(teacher_of(project), accumulate=2) == []

    body()
