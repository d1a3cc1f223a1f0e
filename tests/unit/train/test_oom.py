from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from paceline.errors import TrainError


class Greedy(nn.Module):
    """Asks for far more memory than any machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        torch.empty(len(inputs), 2**50, dtype=torch.uint8)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def test_out_of_memory_says_what_was_requested_what_was_free_and_what_to_change() -> None:
    trainer = tiny.classifier_trainer(Greedy(), batch=16, accumulate=2)
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), epochs=1)
    text = str(caught.value)
    assert caught.value.code == "train.out-of-memory"
    assert f"tried to allocate {8 * 2**20:.1f} GiB" in text and "was free" in text and "rank 0 (cpu)" in text
    assert "micro-batch of 8 samples" in text
    assert "micro_batch: 4 (accumulate 4" in text and "precision: bf16" in text


def test_out_of_memory_is_explained_in_a_custom_loop_too() -> None:
    trainer = tiny.classifier_trainer(Greedy())
    for height in (trainer.training_step, trainer.forward):
        with pytest.raises(TrainError) as caught:
            height(tiny.blobs(16)[:])
        assert caught.value.code == "train.out-of-memory"


def test_other_errors_are_raised_unchanged() -> None:
    def fail(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        tiny.classifier_trainer(loss_fn=fail).train(tiny.blobs(), epochs=1)
