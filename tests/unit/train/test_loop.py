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
from paceline.log import rank_log
from paceline.monitor.progress_bar import Display
from paceline.run.history import History
from paceline.train.callbacks import Callbacks
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.loop import StepActions
from paceline.train.recorder import Recorder, Sinks


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


class Done:
    """What an actions has had done, in order."""

    def __init__(self, ends_at: int | None = None) -> None:
        self.what: list[Any] = []
        self.ends_at = ends_at
        self.position = TrainProgress()

    def evaluate(self, step: int, epoch: int, due: bool) -> str | None:
        self.what.append(("evaluate" if due else "evaluate, not due", step))
        if due:
            self.position.evaluated = step
        return "early stop" if step == self.ends_at else None

    def actions(self, **settings: Any) -> StepActions:
        device, log = torch.device("cpu"), rank_log(0, quiet=True)
        hooks = Callbacks([])
        recorder = Recorder(History(), Sinks(), Display(None, 0), device, hooks, lambda record: False, log, None)
        return StepActions(
            recorder,
            hooks,
            self.position,
            settings.pop("log_every", 1000),
            evaluate=self.evaluate,
            end_of_epoch=lambda: self.what.append("epoch"),
            save=lambda step: self.what.append(("save", step)),
            save_last=lambda step: self.what.append(("save last", step)),
            **settings,
        )


def train(actions: StepActions, *, first: int = 0, stop: int = 10_000, epoch_length: int = 10_000) -> int:
    """As the loop does; returns the last step."""
    step, due = first, actions.next_due(first)
    while step < stop:
        step += 1
        if step >= due:
            if not actions.run_due(step, (step - 1) // epoch_length):
                break
            due = actions.next_due(step)
    actions.finish(step, (step - 1) // epoch_length)
    return step


def test_the_next_due_step_is_the_nearest_of_all_intervals() -> None:
    actions = Done().actions(log_every=10, eval_every=7, save_every=4, max_steps=13)
    assert [actions.next_due(step) for step in range(13)] == [4, 4, 4, 4, 7, 7, 7, 8, 10, 10, 12, 12, 13]


def test_evaluations_and_saves_come_at_their_intervals_and_the_last_step_is_saved() -> None:
    done = Done()
    assert train(done.actions(eval_every=2, save_every=3, max_steps=5)) == 5
    assert done.what == [
        ("evaluate", 2), ("save", 3), ("evaluate", 4), ("save last", 5), ("evaluate, not due", 5),
    ]  # fmt: skip


def test_without_an_interval_an_evaluation_follows_the_end_of_each_epoch() -> None:
    done = Done()
    actions = done.actions(steps_per_epoch=2, max_steps=4)
    train(actions, epoch_length=2)
    assert done.what == ["epoch", ("evaluate", 2), "epoch", ("evaluate", 4), ("save last", 4)]
    assert done.position.epochs_ended == 2 and "max_steps" in actions.reason


def test_training_ends_for_the_reason_that_an_evaluation_gives() -> None:
    done = Done(ends_at=4)
    actions = done.actions(eval_every=2, max_steps=9)
    assert train(actions) == 4
    assert actions.reason == "early stop" and done.what[-1] == ("save last", 4)


@pytest.mark.parametrize("evaluated", [0, 4])
def test_a_resumed_run_makes_up_for_an_evaluation_that_was_due_and_not_done(evaluated: int) -> None:
    done = Done()
    done.position.evaluated = evaluated
    assert done.actions(eval_every=2, began_at=4).begin(4, 0)
    assert done.what == ([] if evaluated == 4 else [("evaluate", 4)])


def test_data_of_unknown_length_ends_an_epoch_where_it_ends() -> None:
    done = Done()
    actions = done.actions()
    assert actions.epoch_ended(3, 0) and actions.epoch_ended(3, 0)
    assert done.what == ["epoch", ("evaluate", 3)]
    actions.finish(5, 1)
    assert done.what[2:] == ["epoch", ("evaluate", 5), ("save last", 5)]


def test_a_call_that_takes_no_step_neither_saves_nor_evaluates() -> None:
    done = Done()
    done.actions(began_at=7, max_steps=7).finish(7, 0)
    assert done.what == []
