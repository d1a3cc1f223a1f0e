"""Memory that runs out, sizes that are found, bits that repeat, and what a step costs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import tiny
from paceline.errors import TrainError
from paceline.train import batch_size_finder


class Greedy(nn.Module):
    """Asks for far more memory than any machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        torch.empty(len(inputs), 2**50, dtype=torch.uint8)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def test_out_of_memory_says_what_was_asked_what_was_free_and_what_to_change() -> None:
    trainer = tiny.classifier_trainer(Greedy(), batch=16, accumulate=2)
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), epochs=1)
    text = str(caught.value)
    assert caught.value.code == "train.out-of-memory"
    assert f"{8 * 2**20:.1f} GiB more" in text and "was free" in text and "rank 0 (cpu)" in text
    assert "micro-batch of 8 samples" in text
    assert "micro_batch: 4 (accumulate 4" in text and "precision: bf16" in text


def test_out_of_memory_is_explained_in_a_loop_of_ones_own_too() -> None:
    trainer = tiny.classifier_trainer(Greedy())
    for height in (trainer.training_step, trainer.forward):
        with pytest.raises(TrainError) as caught:
            height(tiny.blobs(16)[:])
        assert caught.value.code == "train.out-of-memory"


def test_other_errors_pass_as_they_are() -> None:
    def fail(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        tiny.classifier_trainer(loss_fn=fail).train(tiny.blobs(), epochs=1)


@pytest.mark.parametrize(("limit", "most"), [(1, 64), (5, 64), (37, 64), (64, 64), (1000, 64), (3, 3), (1, 1)])
def test_the_search_finds_the_largest_size_to_an_eighth(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = batch_size_finder.search(fits, most)
    best = min(limit, most)
    assert found <= best <= found + max(1, found // 8)
    assert found in tried and len(tried) == len(set(tried))


def test_where_not_even_one_sample_fits_there_is_a_code() -> None:
    with pytest.raises(TrainError) as caught:
        batch_size_finder.search(lambda size: False, 8)
    assert caught.value.code == "train.finder-nothing-fits"


def test_the_finder_is_refused_on_cpu_with_the_reason() -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(micro_batch="auto", device="cpu")
    assert caught.value.code == "train.finder-on-cpu" and "swap" in str(caught.value)


def test_deterministic_gives_the_same_bits_twice() -> None:
    def train() -> torch.Tensor:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        trainer = tiny.classifier_trainer(model, deterministic=True)
        trainer.train(tiny.blobs(), epochs=2)
        return tiny.weights(trainer)

    try:
        assert torch.equal(train(), train())
    finally:
        torch.use_deterministic_algorithms(False)


def test_dp_without_several_gpus_says_what_it_does_instead(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny.classifier_trainer(strategy="dp", quiet=False)
    trainer.train(tiny.blobs(), max_steps=1)
    assert "strategy: ddp" in capsys.readouterr().out


def calls_of(work: Any) -> int:
    """Python function calls that `work` makes."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_step_makes_at_most_25_python_calls_more_than_a_hand_written_loop() -> None:
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

    assert a_step(by_trainer) <= a_step(by_hand) + 25
