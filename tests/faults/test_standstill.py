"""Data that stands still: nobody waits in a collective, or everybody waits for one rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import paceline
from paceline import dist
from paceline.errors import PacelineError

TIMEOUT = 10.0  # a standstill of data ends a run two seconds earlier: on a machine under load, less would be too close


class Stuck(Dataset[Any]):
    """Waits for a lock that nobody releases, after a few samples."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self.read = ranks, 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read > 20 and RANK[0] in self.ranks:
            threading.Event().wait()
        return torch.zeros(4), torch.tensor(0)


RANK = [0]  # in workers, which have no process group


def train(ranks: tuple[int, ...], workers: int) -> None:
    RANK[0] = dist.rank()
    torch.manual_seed(0)
    trainer = paceline.Trainer(
        nn.Linear(4, 2),
        criterion=nn.CrossEntropyLoss(),
        batch=8,
        timeout=TIMEOUT,
        workers=workers,
        run=False,
        quiet=True,
    )
    trainer.train(Stuck(ranks), epochs=1)


def refused(ranks: tuple[int, ...], workers: int = 0) -> str:
    with pytest.raises(PacelineError) as caught:
        paceline.launch(lambda: train(ranks, workers), ranks=2)
    assert caught.value.code == "data.stands-still"
    return str(caught.value)


def test_ranks_that_all_stand_still_say_where() -> None:
    text = refused((0, 1))
    assert "ranks 0, 1: trainer.train() at test_standstill.py:" in text
    assert "in __getitem__() at test_standstill.py:" in text


def test_the_rank_whose_worker_stands_still_is_named_before_others_time_out() -> None:
    text = refused((1,), workers=1)
    assert "Rank 1 has waited" in text
    assert "rank 1: trainer.train() at" in text
    assert "waiting for a DataLoader worker" in text
    assert "rank 0: trainer.train() at" in text


def test_the_timeout_of_a_collective_says_where_the_other_rank_is() -> None:
    def body() -> None:
        trainer = paceline.Trainer(nn.Linear(4, 2), criterion=nn.CrossEntropyLoss(), timeout=TIMEOUT, run=False)
        for step in range(3):
            if step == 2 and dist.rank() == 1:
                threading.Event().wait(20 * TIMEOUT)
            start = 8 * step + 4 * dist.rank()
            trainer.training_step((torch.arange(start, start + 16).reshape(4, 4) / 16, torch.zeros(4).long()))

    with pytest.raises(PacelineError) as caught:
        paceline.launch(body, ranks=2)
    assert "Where ranks stand:" in str(caught.value)
    assert "rank 0: trainer.training_step() at test_standstill.py:" in str(caught.value)
    assert "rank 1: test_standstill.py:" in str(caught.value)
