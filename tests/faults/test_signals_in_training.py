"""A signal to one rank of a training: all ranks act on it, at the same step, and nothing of the training is lost.

Callbacks send the signals, so each comes at a known step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import forked
import tiny
from faults import worlds
from paceline.checkpoint.checkpoint_store import step_name
from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.reader import verified
from paceline.train import rank_poll

STEPS, SENT = 8, 5


def this_rank() -> int:
    return int(os.environ["RANK"])


class Sends:
    """A callback that sends signals to its own process, on one rank."""

    def __init__(self, *signals: int, rank: int = 1, after: int = SENT) -> None:
        self.signals, self.rank, self.after = signals, rank, after

    def on_step(self, record: Any) -> None:
        if record.step == self.after and this_rank() == self.rank:
            for number in self.signals:
                os.kill(os.getpid(), number)


def train(folder: Path, steps: int = STEPS, **settings: Any) -> list[float]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    settings = {"strategy": "ddp", "log_every": 1, "keep": None, **settings}
    trainer = tiny.classifier_trainer(run=str(folder / "r"), resume="auto", **settings)
    return trainer.train(tiny.blobs(), max_steps=steps).losses


def saved(folder: Path) -> list[str]:
    return sorted(checkpoint.at.name for checkpoint in verified(LocalStore(folder / "r" / "checkpoints")))


@pytest.mark.parametrize(
    ("strategy", "rank"), [("ddp", 1), ("fsdp", 0), pytest.param("fsdp", 1, marks=pytest.mark.nightly)]
)
def test_after_a_sigterm_to_one_rank_both_save_the_same_step_and_end(tmp_path: Path, strategy: str, rank: int) -> None:
    callbacks = [Sends(signal.SIGTERM, rank=rank)]
    ended = worlds.run(2, partial(train, tmp_path, strategy=strategy, save_every=3, callbacks=callbacks))
    assert [each.status for each in ended] == [-signal.SIGTERM] * 2, ended
    assert saved(tmp_path) == ["step-000003", "step-000005"]
    whole = worlds.values(2, partial(train, tmp_path / "whole", strategy=strategy))
    assert worlds.values(2, partial(train, tmp_path, strategy=strategy)) == [losses[SENT:] for losses in whole]


class SendsWhenRead(Dataset[Any]):
    """Validation data. Reading the 50th sample sends SIGTERM on one rank; reading most of them afterwards fails."""

    def __init__(self, rank: int | None) -> None:
        self.data, self.rank, self.read = tiny.blobs(100 if rank is None else 4000), rank, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read == 50 and this_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        assert self.rank is None or self.read < 1000, "the validation went on"
        return self.data[index]


class Unmeasured(IterableDataset[Any]):
    """An epoch of unknown length: 40 samples."""

    def __iter__(self) -> Iterator[Any]:
        data = tiny.blobs()
        return (data[index] for index in range(40))


def evaluated(folder: Path, rank: int | None, data: Any = None, **settings: Any) -> list[Any]:
    settings = {"strategy": "ddp", "log_every": 1, "ema": 0.9, **settings}
    trainer = tiny.classifier_trainer(run=str(folder / "r"), resume="auto", **settings)
    return trainer.train(data or tiny.blobs(), SendsWhenRead(rank), max_steps=STEPS).evaluations


@pytest.mark.parametrize(
    ("settings", "data", "step"),
    [
        ({"eval_every": 4}, None, 4),
        pytest.param({"eval_every": 4, "strategy": "fsdp"}, None, 4, marks=pytest.mark.nightly),
        pytest.param({"eval_every": 100}, None, STEPS, marks=pytest.mark.nightly),  # the last one
        pytest.param({}, Unmeasured(), None, marks=pytest.mark.nightly),  # at the end of the first epoch
    ],
    ids=["ddp", "fsdp", "last", "epoch"],
)
def test_a_signal_ends_a_validation_which_a_resumed_run_repeats(
    tmp_path: Path, settings: dict[str, Any], data: Any, step: int | None
) -> None:
    ended = worlds.run(2, partial(evaluated, tmp_path, 1, data, **settings))
    assert [each.status for each in ended] == [-signal.SIGTERM] * 2, ended
    assert len(saved(tmp_path)) == 1 and (step is None or saved(tmp_path) == [step_name(step)])
    whole = worlds.values(2, partial(evaluated, tmp_path / "whole", None, data, **settings))
    assert worlds.values(2, partial(evaluated, tmp_path, None, data, **settings)) == whole and whole[0]


def test_between_log_points_a_signal_is_noticed_too(tmp_path: Path) -> None:
    ended = worlds.run(2, partial(train, tmp_path, steps=10**7, log_every=10**7, callbacks=[Sends(signal.SIGTERM)]))
    assert [each.status for each in ended] == [-signal.SIGTERM] * 2, ended
    assert len(saved(tmp_path)) == 1


def test_a_sigterm_in_the_last_second_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_poll, "_INTERVAL", 1e9)  # a slow machine would notice it before the end
    monkeypatch.setattr(rank_poll, "_GROWTH", 1e9)
    ended = worlds.run(2, partial(train, tmp_path, log_every=100, callbacks=[Sends(signal.SIGTERM, after=STEPS - 1)]))
    assert [each.status for each in ended] == [-signal.SIGTERM] * 2
    assert saved(tmp_path) == [step_name(STEPS)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_was_not_finite_is_not_saved_for_a_signal(tmp_path: Path, ranks: int) -> None:
    def body() -> None:
        inputs, targets = tiny.blobs().tensors
        inputs[7] = float("nan")
        callbacks = [Sends(signal.SIGTERM, rank=0)]
        trainer = tiny.classifier_trainer(strategy="ddp", run=str(tmp_path / "r"), log_every=10**7, callbacks=callbacks)
        trainer.train(TensorDataset(inputs, targets), max_steps=10**7)

    ended = worlds.run(ranks, body)
    assert ({each.code for each in ended}, saved(tmp_path)) == ({"train.nonfinite"}, [])


def test_training_continues_after_sigusr1(tmp_path: Path) -> None:
    sends = [Sends(signal.SIGUSR1, after=3), Sends(signal.SIGUSR1, rank=0, after=SENT)]
    losses = worlds.values(2, partial(train, tmp_path, callbacks=sends))
    assert losses == worlds.values(2, partial(train, tmp_path / "whole"))
    assert saved(tmp_path) == ["step-000003", "step-000005", "step-000008"]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp"])
def test_an_interrupt_saves_and_is_a_keyboard_interrupt_on_all_ranks(tmp_path: Path, strategy: str) -> None:
    ended = worlds.run(2, partial(train, tmp_path, strategy=strategy, callbacks=[Sends(signal.SIGINT)]))
    assert [each.kind for each in ended] == ["KeyboardInterrupt"] * 2
    assert saved(tmp_path) == [step_name(SENT)]


def test_a_second_interrupt_does_not_wait_for_the_end_of_the_step(tmp_path: Path) -> None:
    ended = worlds.run(2, partial(train, tmp_path, callbacks=[Sends(signal.SIGINT, signal.SIGINT)]))
    assert ended[1].status == -signal.SIGINT and "interrupted again: exiting" in ended[1].output
    assert ended[0].status == 1  # whose partner is gone


def test_a_save_that_would_not_fit_into_the_grace_is_not_begun(tmp_path: Path) -> None:
    settings = {"save_every": 2, "checkpoint": {"grace": 1e-6, "background": False}}
    ended = worlds.run(2, partial(train, tmp_path, callbacks=[Sends(signal.SIGTERM)], **settings))
    assert [each.status for each in ended] == [-signal.SIGTERM] * 2
    assert f"step {SENT} is not saved" in ended[0].output and "checkpoint.grace" in ended[0].output
    assert saved(tmp_path) == ["step-000002", "step-000004"]


def test_a_save_that_fits_into_the_grace_is_made(tmp_path: Path) -> None:
    settings = {"save_every": 2, "checkpoint": {"grace": 600.0}}
    ended = worlds.run(2, partial(train, tmp_path, callbacks=[Sends(signal.SIGTERM)], **settings))
    assert [each.status for each in ended] == [-signal.SIGTERM] * 2
    assert saved(tmp_path)[-1] == step_name(SENT)


SCRIPT = """
import os, signal, sys, json
from pathlib import Path
import psutil
sys.path.insert(0, sys.argv[1])
import tiny

class Sends:  # to the launcher, once
    def on_step(self, record):
        if sys.argv[2] != "none" and record.step == 5 and os.environ["RANK"] == "0":
            os.kill(psutil.Process().parent().ppid(), getattr(signal, sys.argv[2]))

trainer = tiny.classifier_trainer(strategy="ddp", run=os.path.abspath("r"), resume="auto", callbacks=[Sends()])
losses = trainer.train(tiny.blobs(), max_steps=int(sys.argv[3])).losses
if trainer.is_main_process:
    Path("losses").write_text(json.dumps(losses))
"""


def launch(folder: Path, sent: str, steps: int) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    beside = str(Path(__file__).parents[1])
    return forked.paceline("launch", "-n", "2", "script.py", beside, sent, str(steps), cwd=folder)


def test_under_the_launcher_a_sigterm_costs_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "SIGTERM", 10**7)
    assert done.returncode == 143, done.stderr
    step = int(saved(tmp_path)[-1].removeprefix("step-"))
    again = launch(tmp_path, "none", step + 2)
    assert again.returncode == 0, again.stderr
    whole = worlds.values(2, partial(train, tmp_path / "whole", step + 2, log_every=100))
    assert json.loads((tmp_path / "losses").read_text()) == whole[0][step:]


def test_under_the_launcher_an_interrupt_saves(tmp_path: Path) -> None:
    done = launch(tmp_path, "SIGINT", 10**7)
    assert (done.returncode, len(saved(tmp_path))) == (130, 1), done.stderr
