"""A model that is wrapped in torch's DataParallel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from paceline.config.recipe import Config
from paceline.log import rank_log
from paceline.parallel import data_parallel


def wrapped(*gpus: int) -> nn.Module:
    model = nn.DataParallel(tiny.classifier())
    model.device_ids = list(gpus)  # as on a machine with so many
    return model


@pytest.mark.parametrize(
    ("model", "settings", "ranks", "strategy", "warns"),
    [
        (wrapped(0, 1), {}, 1, "dp", False),
        (wrapped(0, 1), {}, 2, "auto", False),  # the layout of the launch
        (wrapped(0), {}, 1, "auto", False),
        (tiny.classifier(), {}, 1, "auto", False),
        (wrapped(0, 1), {"strategy": "dp"}, 1, "dp", False),
        (wrapped(0, 1), {"strategy": "single"}, 1, "single", True),
        (wrapped(0, 1, 2), {}, 1, "auto", True),  # other GPUs than the visible ones
    ],
)
def test_data_parallel_uses_its_gpus_or_is_warned_about(
    model: nn.Module,
    settings: dict[str, str],
    ranks: int,
    strategy: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(data_parallel, "gpus", lambda: [torch.device("cuda", 0), torch.device("cuda", 1)])
    config = Config.from_dict(settings)
    assert data_parallel.follow_wrapper(config, model, ranks, rank_log(0)).strategy == strategy
    assert ("start one rank per GPU with paceline launch" in capsys.readouterr().out) == warns


def test_data_parallel_without_its_gpus_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny.classifier_trainer(wrapped(0, 1))
    assert "DataParallel over 2 GPUs, but this run uses one" in capsys.readouterr().out
    trainer.train(tiny.blobs(), max_steps=1)
