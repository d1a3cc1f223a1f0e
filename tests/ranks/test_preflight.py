"""Before the first step: ranks that do not mean the same thing are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, random_split

import tiny
from paceline import dist
from paceline.errors import PacelineError
from paceline.testing import ranks
from paceline.train import preflight


def code_of(work: Any) -> tuple[str, str]:
    with pytest.raises(PacelineError) as caught:
        work()
    return caught.value.code, str(caught.value)


@ranks(3)
def test_a_replica_with_other_weights_is_named_with_its_parameter() -> None:
    trainer = tiny.classifier_trainer()
    if dist.rank() == 1:
        with torch.no_grad():
            trainer.model[2].bias[0] += 1e-6
    code, text = code_of(lambda: trainer.train(tiny.blobs(), max_steps=1))
    assert code == "world.different-weights"
    assert "2.bias" in text and "ranks 0, 2" in text and "rank 1" in text and "0.weight" not in text


@ranks(2)
def test_the_same_batch_on_two_ranks_is_found() -> None:
    trainer = tiny.classifier_trainer()
    code, text = code_of(lambda: trainer.training_step(tiny.blobs()[:8]))
    assert code == "data.same-samples" and "Ranks 0 and 1" in text


@ranks(2)
def test_batches_of_each_ranks_own_pass() -> None:
    trainer = tiny.classifier_trainer()
    first = 8 * dist.rank()
    assert trainer.training_step(tiny.blobs()[first : first + 8]).stepped


@ranks(2)
def test_a_random_split_without_a_seed_is_found() -> None:
    torch.manual_seed(dist.rank())
    part, _ = random_split(tiny.blobs(), [32, 16])
    code, text = code_of(lambda: tiny.classifier_trainer().train(part, max_steps=1))
    assert code == "data.different-data" and "Subset" in text


@ranks(2)
def test_ready_batches_that_differ_between_ranks_are_found() -> None:
    batches = [tiny.blobs(16, first=dist.rank())[:]]
    assert code_of(lambda: tiny.classifier_trainer().train(batches, max_steps=1))[0] == "data.different-data"


@ranks(2)
def test_another_version_on_a_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.rank() == 1:
        monkeypatch.setattr(torch, "__version__", "2.12.9")
    code, text = code_of(lambda: tiny.classifier_trainer().train(tiny.blobs(), max_steps=1))
    assert code == "world.different-versions" and "2.12.9" in text and "rank 1" in text


class Spare(nn.Module):
    """Has a layer that its loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs


@ranks(2)
def test_an_unused_parameter_is_an_error_that_names_it_and_says_what_to_set() -> None:
    code, text = code_of(lambda: tiny.classifier_trainer(Spare()).train(tiny.blobs(), max_steps=1))
    assert code == "train.unused-parameters"
    assert "spare.weight, spare.bias" in text and "Linear" in text and "unused_parameters: allow" in text


@ranks(2)
def test_an_unused_parameter_can_be_allowed() -> None:
    trainer = tiny.classifier_trainer(Spare(), unused_parameters="allow")
    before = trainer.model.spare.weight.clone()
    history = trainer.train(tiny.blobs(), epochs=2)
    assert history.losses[-1] < history.losses[0]
    assert torch.equal(trainer.model.spare.weight, before)


def test_on_one_rank_an_unused_parameter_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    tiny.classifier_trainer(Spare()).train(tiny.blobs(), max_steps=1)
    assert "does not depend on spare.weight, spare.bias" in capsys.readouterr().out


class Restless(nn.Module):
    """Draws, counts in a buffer and has a batch norm: everything that a pre-flight has to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def restless() -> Restless:
    torch.manual_seed(5)
    return Restless()


@pytest.mark.parametrize("world", [1, 2])
def test_a_preflight_leaves_no_trace(world: int) -> None:
    @ranks(world)
    def body() -> None:
        trained = []
        for checked in (True, False):
            trainer = tiny.classifier_trainer(restless(), preflight=checked)
            trainer.train(tiny.blobs(), epochs=1)
            assert trainer.model.forwards == 3
            trained.append(torch.cat([t.flatten().double() for t in trainer.model.state_dict().values()]))
        assert torch.equal(*trained)

    body()


def test_buffers_that_a_forward_replaces_are_put_back() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("wide", torch.zeros(1).expand(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            outputs: torch.Tensor = self.layer(inputs)
            return outputs

    trainer = tiny.classifier_trainer(Replacing())
    trainer.train(tiny.blobs(), epochs=1)
    assert trainer.model.count == 3


def test_the_nominal_weight_is_a_power_of_two_near_the_real_one() -> None:
    assert [preflight.nominal(weight, 1) for weight in (0.0, 1.0, 3.0, 1000.0)] == [1.0, 1.0, 4.0, 1024.0]
    assert preflight.nominal(1000.0, 3) == 2048.0 or preflight.nominal(1000.0, 3) == 4096.0


@ranks(2)
def test_without_preflight_nothing_is_compared() -> None:
    trainer = tiny.classifier_trainer(preflight=False)
    assert len(trainer.train(Subset(tiny.blobs(), range(dist.rank(), 32 + dist.rank())), epochs=1).steps) == 2
