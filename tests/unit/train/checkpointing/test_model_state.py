from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from paceline.errors import CheckpointError
from resumable import Net, points, require_same_end, trainer


class Counts(Net):
    """Remembers a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return super().forward(inputs)

    def get_extra_state(self) -> torch.Tensor:
        return self.count.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state


@pytest.mark.parametrize("weights_only", [False, True])
def test_extra_state_that_is_a_tensor_is_restored(tmp_path: Path, weights_only: bool) -> None:
    first, second = trainer(Counts), trainer(Counts)
    first.train(points(), max_steps=3)
    first.save_checkpoint(tmp_path / "c")
    second.load_checkpoint(tmp_path / "c", weights_only=weights_only)
    assert second.model.count == first.model.count > 0


def test_another_model_is_not_called_another_optimizer(tmp_path: Path) -> None:
    tiny.classifier_trainer().save_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"checkpoint\.other-model"):
        trainer().load_checkpoint(tmp_path / "c")


def test_buffers_are_mended_from_those_that_were_loaded(tmp_path: Path) -> None:
    data = points()
    data.tensors[0][32:40] = float("nan")
    settings = {"nonfinite": "skip", "shuffle": False, "clip_norm": 1.0}
    require_same_end(lambda: trainer(lambda: Net(norm=True), **settings), tmp_path, data, at=4, steps=8)
