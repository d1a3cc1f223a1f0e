"""`ddp: {bucket_mb: auto}` measures, and nothing else changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from heard import heard
from paceline import Trainer, dist
from paceline.train import first_step
from worlds import ranks

SMALL = 0.0002  # MB: a parameter or two


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "SIZES", (SMALL, 0.001, 25.0))
    monkeypatch.setattr(first_step, "_ROUNDS", 1)
    monkeypatch.setattr(first_step, "select", lambda seconds: SMALL)  # not the one that happens to be fastest


def trainer(bucket_mb: Any, **settings: Any) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Linear(16, 2)]
    settings = {"ddp": {"bucket_mb": bucket_mb}, "save_last": False, **settings}
    return tiny.classifier_trainer(nn.Sequential(*layers), **settings)


def bits(of: Trainer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in of.model.state_dict().values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def says(lines: list[str], words: str) -> bool:
    return not dist.is_main() or any(words in line for line in lines)


@ranks(3)
def test_training_has_the_bits_of_the_selected_size() -> None:
    """On three ranks, sums depend on the buckets."""
    with heard(logging.NOTSET) as lines:
        measured = trainer("auto", quiet=False)
        measured.train(tiny.blobs(), max_steps=6)
    assert measured.config.ddp.bucket_mb == SMALL
    assert says(lines, "ddp: bucket_mb: auto selected 0.0002 MB (0.0002 MB ")
    given, default = trainer(SMALL), trainer(None)
    given.train(tiny.blobs(), max_steps=6)
    default.train(tiny.blobs(), max_steps=6)
    assert same(bits(measured), bits(given))
    assert not same(bits(measured), bits(default))  # or this would show nothing


@ranks(2)
def test_a_compression_does_not_see_the_trials() -> None:
    sync = {"compress": "powersgd", "start": 2}  # counts the steps that it reduces
    measured, given = trainer("auto", sync=sync), trainer(SMALL, sync=sync)
    measured.train(tiny.blobs(), max_steps=4)
    given.train(tiny.blobs(), max_steps=4)
    assert measured.config.ddp.bucket_mb == SMALL and same(bits(measured), bits(given))


def test_a_resumed_run_uses_the_size_of_its_checkpoint(tmp_path: Path) -> None:
    @ranks(3)
    def train() -> None:
        settings = {"run": str(tmp_path / "run"), "save_every": 3, "quiet": False}
        first = trainer("auto", **settings)
        first.train(tiny.blobs(), max_steps=6)
        first_step._measure = None  # type: ignore[assignment]
        with heard(logging.NOTSET) as lines:
            second = trainer("auto", resume=str(tmp_path / "run" / "checkpoints" / "step-000003"), **settings)
            assert second.config.ddp.bucket_mb == SMALL and second.step_count == 3
            second.train(tiny.blobs(), max_steps=6)
        assert says(lines, "ddp: bucket_mb: auto uses 0.0002 MB, as measured before this checkpoint")
        assert same(bits(first), bits(second))

    train()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_without_ddp_it_has_no_effect(strategy: str) -> None:
    def train() -> None:
        with heard(logging.NOTSET) as lines:
            layout = trainer("auto", strategy=strategy, quiet=False)
            layout.train(tiny.blobs(), max_steps=2)
        assert says(lines, "bucket_mb: auto has no effect")
        assert layout.config.ddp.bucket_mb == "auto"

    ranks(1 if strategy == "ddp" else 2)(train)()
