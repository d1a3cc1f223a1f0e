from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline
import tiny


def calls_of(work: Any, file: str = "") -> int:
    """Python function calls that `work` makes, or those of functions in `file`."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.endswith(file)

    before = sys.getprofile()
    gc.disable()  # what tests before left behind may have finalizers
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


class Batches:
    """Neither a list nor a DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        return iter([tiny.blobs(16)[:]] * 80)


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from tiny.blobs(16 * 80)


class Own(Dataset[Any]):
    def __init__(self) -> None:
        self._samples = list(tiny.blobs(16 * 80))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


PATHS: dict[str, Callable[[], Any]] = {
    "list": lambda: [tiny.blobs(16)[:]] * 80,
    "iterable": Batches,
    "IterableDataset": lambda: DataLoader(Samples(), batch_size=16),
    "TensorDataset": lambda: DataLoader(tiny.blobs(16 * 80), batch_size=16),
    "own dataset": lambda: DataLoader(Own(), batch_size=16),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_step_makes_no_more_python_calls_than_a_hand_written_loop(path: str) -> None:
    """By difference of a longer and a shorter run, so that starting up does not count."""
    make = PATHS[path]
    criterion = nn.CrossEntropyLoss()

    def by_hand(steps: int) -> None:
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for inputs, targets in islice(make(), steps):
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

    def by_trainer(steps: int) -> None:
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        paceline.Trainer(
            model, optimizer, criterion=criterion, run=False, quiet=True, log_every=10**6
        ).train(make(), max_steps=steps)  # fmt: skip

    def a_step(loop: Any) -> float:
        loop(10)
        return (calls_of(lambda: loop(60)) - calls_of(lambda: loop(20))) / 40

    found = a_step(by_trainer), a_step(by_hand)
    assert found[0] <= found[1], found


@pytest.mark.parametrize(("accumulate", "calls"), [(1, 1), (4, 4)])
def test_a_model_without_dropout_pays_one_call_per_micro_batch_for_random_numbers_by_sample(
    accumulate: int, calls: int
) -> None:
    def train(steps: int) -> None:
        model = tiny.classifier()
        paceline.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.01), criterion=nn.CrossEntropyLoss(), run=False, quiet=True,
            log_every=10**6, accumulate=accumulate,
        ).train([tiny.blobs(16)[:]] * 20, max_steps=steps)  # fmt: skip

    for file, expected in (("runtime/noise.py", calls), ("runtime/sample_keys.py", 0)):
        assert calls_of(lambda: train(20), file) - calls_of(lambda: train(10), file) == 10 * expected
