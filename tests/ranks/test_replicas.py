"""DynamicDDP whose weights have become different are named at the next log point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from paceline import dist
from paceline.errors import PacelineError
from paceline.parallel.shards import local_shard
from paceline.train.checks import same_model
from worlds import ranks


class ChangesWeights:
    """Changes a parameter on one rank, after one step."""

    def __init__(self, rank: int, step: int, name: str) -> None:
        self.rank, self.step, self.name, self.model = rank, step, name, nn.Module()

    def on_step(self, record: Any) -> None:
        if dist.rank() == self.rank and record.step == self.step:
            with torch.no_grad():
                local_shard(self.model.get_parameter(self.name)).view(-1)[0] += 1e-6


def failure(step: int, name: str, rank: int = 1, **settings: Any) -> str:
    change = ChangesWeights(rank, step, name)
    trainer = tiny.classifier_trainer(callbacks=[change], log_every=2, **settings)
    change.model = trainer.model
    with pytest.raises(PacelineError) as caught:
        trainer.train(tiny.blobs(), epochs=4)
    assert caught.value.code == "train.replicas-differ"
    return caught.value.what


def at_every_log_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_model, "_SHARE", 0)


@ranks(3)
def test_a_weight_that_changes_on_one_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    at_every_log_point(monkeypatch)
    text = failure(7, "2.bias")
    # All weights follow within a step, because gradients are computed from them: only the order is the model's.
    assert "replicas hold different weights: 0.weight" in text or "replicas hold different weights: 2.bias" in text
    assert "ranks 0, 2: checksum" in text and "rank 1: checksum" in text and "equal after step 6" in text


@ranks(2)
def test_checks_continue_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    at_every_log_point(monkeypatch)
    monkeypatch.setattr(same_model, "_BYTES", 64)  # every check covers a part of a parameter
    assert "2.weight" in failure(1, "2.weight")


@ranks(2)
def test_the_last_step_is_checked_before_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_model, "_SHARE", 1e9)  # no second check
    assert "After step 12" in failure(12, "2.bias")


@ranks(4)
def test_replicas_of_shards_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    at_every_log_point(monkeypatch)
    text = failure(3, "0.weight", rank=3, layout={"replicate": 2, "shard": 2})
    assert "rank 1: checksum" in text and "rank 3: checksum" in text and "rank 0" not in text


@ranks(2)
def test_a_custom_loop_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    at_every_log_point(monkeypatch)
    trainer = tiny.classifier_trainer(log_every=1)
    with pytest.raises(PacelineError) as caught:
        for batch in trainer.loader(tiny.blobs()):
            trainer.training_step(batch)
            if dist.rank() == 1:
                with torch.no_grad():
                    trainer.model[0].bias += 1e-3
    assert caught.value.code == "train.replicas-differ"


@ranks(2)
def test_without_preflight_replicas_are_not_compared() -> None:
    trainer = tiny.classifier_trainer(preflight=False, log_every=1)
    with torch.no_grad():
        trainer.model[0].bias += dist.rank()
    assert len(trainer.train(tiny.blobs(), epochs=1).steps) == 3
