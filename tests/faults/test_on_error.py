"""An exception ends training: what was whole is saved, the exception is what the user sees, and a resumed run is exact.

And a save that fails does not end training, unless it is the third in a row or the last.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import tiny
from faults import worlds
from paceline.checkpoint.checkpoint_store import step_name
from paceline.checkpoint.local_store import Filesystem, LocalStore
from paceline.checkpoint.reader import verified
from paceline.train.checkpointing import saver

STEPS, BROKEN = 8, 5
LATER = pytest.mark.nightly


class Broken(Exception):
    pass


def this_rank() -> int:
    return int(os.environ.get("RANK", 0))


class RaisesAfter:
    """A callback."""

    def __init__(self, step: int, ranks: tuple[int, ...] = (0, 1), error: type[BaseException] = Broken) -> None:
        self.step, self.ranks, self.error = step, ranks, error

    def on_step(self, record: Any) -> None:
        if record.step == self.step and this_rank() in self.ranks:
            raise self.error("mine")


class RaisingData(Dataset[Any]):
    """Can't read one of its samples."""

    draws_randomness = False

    def __init__(self) -> None:
        self.samples = tiny.blobs()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise Broken("mine")
        return self.samples[index]


class RaisingModel(torch.nn.Module):
    """Fails in one forward of its training."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.layers, self.calls, self.at = tiny.classifier(), 0, at

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        result: torch.Tensor = self.layers(inputs)
        if self.calls == self.at:
            raise Broken("mine")
        return result


class RaisingOptimizer(torch.optim.SGD):
    """Changes some weights and fails."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == BROKEN:
            self.param_groups[0]["params"][0].data.zero_()
            raise Broken("mine")
        return super().step(closure)


def train(folder: Path, data: Any = None, model: torch.nn.Module | None = None, **settings: Any) -> list[float]:
    """The losses of the steps that were trained here."""
    settings = {"strategy": "ddp", "run": str(folder / "r"), "resume": "auto", "log_every": 1, **settings}
    trainer = tiny.classifier_trainer(model, **settings)
    return trainer.train(tiny.blobs() if data is None else data, max_steps=STEPS).losses


def saved(folder: Path) -> list[str]:
    found = verified(LocalStore(folder / "r" / "checkpoints"))
    return sorted(checkpoint.at.name for checkpoint in found)


def broken(number: int, body: Callable[[], Any]) -> list[worlds.Ended]:
    ended = worlds.run(number, body)
    assert [each.status for each in ended] == [1] * number, ended
    return ended


@pytest.mark.parametrize(
    ("strategy", "background"),
    [("ddp", True), ("fsdp", False), pytest.param("ddp", False, marks=LATER), pytest.param("fsdp", True, marks=LATER)],
)
def test_after_an_error_on_all_ranks_the_run_resumes_from_its_last_step(
    tmp_path: Path, strategy: str, background: bool
) -> None:
    settings = {"strategy": strategy, "save_every": 2, "keep": 1, "checkpoint": {"background": background}}
    ended = broken(2, partial(train, tmp_path, callbacks=[RaisesAfter(BROKEN)], **settings))
    assert [each.kind for each in ended] == ["Broken", "Broken"]
    assert f"step {BROKEN} was saved" in ended[0].output
    assert saved(tmp_path) == [step_name(BROKEN)]  # the one that was being written is older, and went
    assert LocalStore(tmp_path / "r" / "checkpoints").pointer("latest") == [step_name(BROKEN)]
    whole = worlds.values(2, partial(train, tmp_path / "whole", strategy=strategy))
    assert worlds.values(2, partial(train, tmp_path, **settings)) == [losses[BROKEN:] for losses in whole]


def test_data_that_cannot_be_read_costs_no_step(tmp_path: Path) -> None:
    ended = broken(1, partial(train, tmp_path, RaisingData()))
    assert "mine" in ended[0].error and len(saved(tmp_path)) <= 1
    reached = worlds.values(1, partial(train, tmp_path / "whole"))[0]
    rest = worlds.values(1, partial(train, tmp_path))[0]
    assert rest == reached[-len(rest) :]


def test_a_model_that_fails_in_a_step_is_saved_as_it_was_before(tmp_path: Path) -> None:
    ended = broken(1, partial(train, tmp_path, model=RaisingModel(BROKEN + 1)))
    assert ended[0].kind == "Broken", ended[0].error
    whole = worlds.values(1, partial(train, tmp_path / "whole", model=RaisingModel(None)))[0]
    step = int(saved(tmp_path)[0].removeprefix("step-"))
    assert worlds.values(1, partial(train, tmp_path, model=RaisingModel(None)))[0] == whole[step:]


def test_where_one_rank_of_two_fails_the_first_saves_what_both_had(tmp_path: Path) -> None:
    ended = broken(2, partial(train, tmp_path, callbacks=[RaisesAfter(BROKEN, ranks=(1,))]))
    assert (ended[1].kind, saved(tmp_path)) == ("Broken", [step_name(BROKEN)])
    whole = worlds.values(2, partial(train, tmp_path / "whole"))
    assert worlds.values(2, partial(train, tmp_path)) == [losses[BROKEN:] for losses in whole]


def test_pieces_without_those_of_another_rank_are_not_saved_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_ON_ERROR_SECONDS", 0.2)
    callbacks = [RaisesAfter(BROKEN, ranks=(1,))]
    ended = broken(2, partial(train, tmp_path, strategy="fsdp", save_every=2, callbacks=callbacks))
    assert ended[1].kind == "Broken"
    assert f"step {BROKEN} was not saved: parameters are sharded" in ended[0].output
    assert saved(tmp_path) == ["step-000002", "step-000004"]


def test_half_an_update_is_not_saved(tmp_path: Path) -> None:
    def body() -> Any:
        model = tiny.classifier()
        return train(tmp_path, model=model, optimizer=RaisingOptimizer(model.parameters(), lr=0.1), save_every=3)

    ended = broken(1, body)
    assert (ended[0].kind, saved(tmp_path)) == ("Broken", ["step-000003"])


def poisoned(sample: int) -> TensorDataset:
    inputs, targets = tiny.blobs().tensors
    inputs[sample] = float("nan")
    return TensorDataset(inputs, targets)


@pytest.mark.parametrize(
    ("ranks", "log_every"), [(2, 1), (1, 4), pytest.param(1, 1, marks=LATER), pytest.param(2, 4, marks=LATER)]
)
def test_a_step_that_is_not_finite_is_not_saved(tmp_path: Path, ranks: int, log_every: int) -> None:
    ended = broken(ranks, partial(train, tmp_path, poisoned(7), log_every=log_every, batch=8))
    assert {each.code for each in ended} == {"train.nonfinite"}
    assert saved(tmp_path) == []


@pytest.mark.parametrize("settings", [{"checkpoint": {"on_error": False}}, {"run": False, "resume": None}])
def test_where_it_is_not_wanted_nothing_is_saved(tmp_path: Path, settings: dict[str, Any]) -> None:
    broken(1, partial(train, tmp_path, callbacks=[RaisesAfter(BROKEN)], **settings))
    assert saved(tmp_path) == []


def test_an_interrupt_from_elsewhere_is_not_saved(tmp_path: Path) -> None:
    ended = broken(1, partial(train, tmp_path, callbacks=[RaisesAfter(BROKEN, error=KeyboardInterrupt)]))
    assert (ended[0].kind, saved(tmp_path)) == ("KeyboardInterrupt", [])


class FullFor:
    """A disk that is full for some saves, by number."""

    def __init__(self, *saves: int) -> None:
        self.saves, self.begun, self.make_folder = saves, 0, Filesystem.make_folder

    def __call__(self, disk: Filesystem, path: Path) -> None:
        if ".partial-" in path.name:
            self.begun += 1
            if self.begun in self.saves:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.make_folder(disk, path)


def train_on(full: FullFor, folder: Path, **settings: Any) -> list[float]:
    Filesystem.make_folder = lambda disk, path: full(disk, path)  # type: ignore[method-assign]
    return train(folder, **settings)


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=LATER)])
def test_a_failed_save_does_not_end_training(tmp_path: Path, background: bool) -> None:
    settings = {"save_every": 2, "checkpoint": {"background": background}}
    ended = worlds.run(2, partial(train_on, FullFor(1, 2), tmp_path, **settings))
    assert [len(each.value) for each in ended] == [STEPS, STEPS]
    assert ended[0].output.count("No space left on device") == ended[0].output.count("Training continues") == 2
    assert saved(tmp_path) == ["step-000006", "step-000008"]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=LATER), "fsdp"])
def test_the_third_failure_in_a_row_ends_it(tmp_path: Path, strategy: str) -> None:
    full = FullFor(*range(2, 99))
    ended = broken(2, partial(train_on, full, tmp_path, save_every=1, strategy=strategy))
    assert [each.code for each in ended] == ["checkpoint.not-saved"] * 2
    assert saved(tmp_path) == ["step-000001"]


def test_at_the_end_a_failure_is_an_error(tmp_path: Path) -> None:
    ended = broken(2, partial(train_on, FullFor(*range(2, 99)), tmp_path, save_every=5))
    assert [each.code for each in ended] == ["checkpoint.not-saved"] * 2
    assert "No space left on device" in ended[0].error and saved(tmp_path) == ["step-000005"]


def test_a_run_that_fails_again_before_its_first_step_saves_no_second_copy(tmp_path: Path) -> None:
    def attempt() -> None:
        class Fails(RaisesAfter):
            def on_start(self, record: Any) -> None:
                if record.step:
                    raise Broken("mine")

        trainer = tiny.classifier_trainer(run=str(tmp_path / "r"), resume="auto", callbacks=[Fails(BROKEN)])
        with pytest.raises(Broken):
            trainer.train(tiny.blobs(), max_steps=STEPS)

    for _ in range(3):
        attempt()
    folders = [path.name for path in (tmp_path / "r" / "checkpoints").iterdir() if path.is_dir()]
    assert folders == [step_name(BROKEN)]
