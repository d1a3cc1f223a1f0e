"""A second call of train(), or another loader, with other data reads all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline


class Remembered(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count, self.seen = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return torch.ones(1) * index / self.count, torch.zeros(1)


class RememberedStream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count, self.seen = count, list[int]()

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            self.seen.append(index)
            yield torch.ones(1) * index / self.count, torch.zeros(1)


class Ends:
    def __init__(self) -> None:
        self.epochs: list[tuple[int, int]] = []

    def on_epoch(self, record: Any) -> None:
        self.epochs.append((record.epoch, record.step))


def trainer_of_one_weight(**settings: Any) -> paceline.Trainer:
    model = nn.Linear(1, 1)
    options: Any = {"criterion": nn.MSELoss(), "shuffle": False, "device": "cpu", "quiet": True, "run": False}
    return paceline.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **{**options, **settings})


@pytest.mark.parametrize("first, second", [(43, 30), (43, 100), (24, 24), (30, 43)])
@pytest.mark.parametrize("kind", [Remembered, RememberedStream])
def test_all_of_the_second_data_is_read(kind: Any, first: int, second: int) -> None:
    ends, data = Ends(), kind(second)
    trainer = trainer_of_one_weight(batch=12, callbacks=[ends])
    steps = -(-first // 12)
    trainer.train(kind(first), epochs=1)
    history = trainer.train(DataLoader(data, batch_size=12, num_workers=0), epochs=3)
    assert data.seen == list(range(second)) * 2
    each = -(-second // 12)
    assert ends.epochs == [(0, steps), (1, steps + each), (2, steps + 2 * each)]
    assert [record["epoch"] for record in history.steps][-1] == 2 and trainer.epoch == 3


def test_data_that_follows_in_the_middle_of_an_epoch_is_read_from_its_beginning() -> None:
    trainer, data = trainer_of_one_weight(batch=12), Remembered(30)
    trainer.train(Remembered(43), max_steps=2)
    trainer.train(data, epochs=1)
    assert data.seen == list(range(30))


def test_the_same_data_goes_on_where_it_was() -> None:
    trainer, data = trainer_of_one_weight(batch=12), Remembered(43)
    trainer.train(data, max_steps=2)
    trainer.train(data, epochs=1)
    assert data.seen == list(range(43))


def test_another_batch_size_begins_anew() -> None:
    trainer, data = trainer_of_one_weight(), Remembered(40)
    trainer.train(DataLoader(data, batch_size=10), epochs=1)
    trainer.train(DataLoader(data, batch_size=20), epochs=2)
    assert data.seen == list(range(40)) * 2 and trainer.step_count == 6


def test_a_custom_loop_reads_all_of_the_second_data() -> None:
    trainer, first, second = trainer_of_one_weight(batch=12), Remembered(43), Remembered(30)
    for data in (first, second, second):
        for batch in trainer.loader(data):
            trainer.training_step(batch)
    assert first.seen == list(range(43)) and second.seen == list(range(30)) * 2


def test_a_resumed_script_passes_over_the_first_call(tmp_path: Path) -> None:
    def script(stop: int | None) -> list[int]:
        trainer = trainer_of_one_weight(batch=12, run=str(tmp_path / "run"), resume="auto")
        first, second = Remembered(43), Remembered(30)
        trainer.train(first, epochs=1)
        trainer.train(second, epochs=2, max_steps=stop)
        return second.seen

    assert script(stop=5) == list(range(12))
    assert script(stop=None) == list(range(12, 30))


def test_a_schedule_with_another_horizon_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of_one_weight(batch=12, schedule={"name": "cosine"})
    for epochs in (1, 2):
        trainer.train(Remembered(36), epochs=epochs)
    assert "[train.lr-jumps] The learning rate jumps from" in caplog.text and "cosine over 6 steps" in caplog.text
