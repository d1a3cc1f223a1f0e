from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import tiny


def calls_of(work: Any, file: str = "") -> int:
    """Python function calls that `work` makes, or those of functions in `file`."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.endswith(file)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_step_makes_no_more_python_calls_than_a_hand_written_loop() -> None:
    """By difference of a longer and a shorter run, so that starting up does not count."""
    data = [tiny.blobs(16)[:]] * 50
    criterion = nn.CrossEntropyLoss()

    def by_hand(steps: int) -> None:
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            inputs, targets = data[step % 50]
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

    def by_trainer(steps: int) -> None:
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        paceline.Trainer(
            model, optimizer, criterion=criterion, run=False, quiet=True, log_every=10**6
        ).train(data, max_steps=steps)  # fmt: skip

    def a_step(loop: Any) -> float:
        loop(10)
        return (calls_of(lambda: loop(150)) - calls_of(lambda: loop(50))) / 100

    assert a_step(by_trainer) <= a_step(by_hand)


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
