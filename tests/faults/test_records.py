"""metrics.jsonl after kills and errors: every step and evaluation once, with the losses of all ranks."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import paceline
import tiny
from faults import worlds
from paceline.errors import LaunchError
from paceline.monitor import rank_stats
from paceline.train.checkpointing import saver

STEPS = 9  # three epochs


class Ends:
    """A callback that ends ranks after a step, or before an evaluation is recorded."""

    def __init__(self, step: int, ranks: Iterable[int], how: str = "kill") -> None:
        self.step, self.ranks, self.how = step, ranks, how

    def on_step(self, record: Any) -> None:
        if record.step == self.step and int(os.environ["RANK"]) in self.ranks:
            if self.how == "raise":
                raise ValueError("mine")
            os.kill(os.getpid(), signal.SIGKILL)


class EndsAfterLastSave:
    def on_save(self, record: Any) -> None:
        if record.step == STEPS - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run: Path, *callbacks: Any, max_steps: int = STEPS, **settings: Any) -> None:
    settings = {"strategy": "ddp", "save_every": 2, "precision": "fp64", "loggers": ["csv"], **settings}
    trainer = tiny.classifier_trainer(run=str(run), resume="auto", callbacks=callbacks, **settings)
    trainer.model.register_forward_hook(lambda model, args, output: trainer.log("width", float(output.shape[-1])))
    trainer.train(tiny.blobs(), tiny.blobs(20), max_steps=max_steps)


def records(run: Path) -> dict[tuple[int, bool], float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {(line["step"], line.get("evaluation", False)): line["loss"] for line in lines}
    assert len(found) == len(lines) and not any("of_rank" in line for line in lines)
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((int(row["step"]), row["loss"] == "") for row in rows) == sorted(found)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], float]:
    run = tmp_path_factory.mktemp("runs") / "whole"
    worlds.values(2, partial(train, run))
    found = records(run)
    assert len(found) == STEPS + 3
    return found


@pytest.mark.parametrize(
    ("end", "log_every", "comes"),
    [
        (Ends(5, [1]), 1, False),
        pytest.param(Ends(5, [1]), 10, False, marks=pytest.mark.nightly),
        pytest.param(Ends(7, [0, 1]), 1, False, marks=pytest.mark.nightly),
        (Ends(7, [0, 1]), 3, False),
        (Ends(5, [0, 1], "raise"), 10, True),
        pytest.param(Ends(5, [1], "raise"), 1, True, marks=pytest.mark.nightly),
        (Ends(5, [0], "raise"), 3, False),  # the other rank waits for this one
    ],
)
def test_after_a_rank_ended_every_step_is_recorded_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[tuple[int, bool], float],
    end: Ends,
    log_every: int,
    comes: bool,
) -> None:
    monkeypatch.setattr(rank_stats, "SECONDS", 30.0 if comes else 0.1)
    ended = worlds.run(2, partial(train, tmp_path / "r", end, log_every=log_every))
    assert all(each.status for each in ended)
    saved = {path.name for path in (tmp_path / "r" / "checkpoints").glob("step-*")}
    assert ("step-000005" in saved) == (end.step == 5)
    worlds.values(2, partial(train, tmp_path / "r", log_every=log_every))
    assert records(tmp_path / "r") == pytest.approx(whole, rel=1e-12)


def test_an_evaluation_after_the_last_save_is_made_up_for(tmp_path: Path) -> None:
    """The last step is in the middle of an epoch, so it is evaluated after it is saved."""
    short = partial(train, tmp_path / "r", max_steps=STEPS - 1, save_every=None)
    ended = worlds.run(2, partial(short, EndsAfterLastSave()))
    assert [each.status for each in ended] == [-signal.SIGKILL] * 2
    worlds.values(2, short)
    found = records(tmp_path / "r")
    assert sorted(step for step, is_evaluation in found if is_evaluation) == [3, 6, STEPS - 1]
    worlds.values(2, short)
    assert records(tmp_path / "r") == found


def test_without_scheduled_saves_the_survivor_saves_and_says_whose_losses_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_stats, "SECONDS", 0.1)
    ended = worlds.run(2, partial(train, tmp_path / "r", Ends(5, [1]), save_every=None, log_every=10, quiet=False))
    assert "step 5 was saved" in ended[0].output and "those of this rank only (of_rank)" in ended[0].output
    assert worlds.values(2, partial(train, tmp_path / "r", save_every=None))


def test_more_than_a_few_steps_are_not_trained_again_for_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_stats, "SECONDS", 0.1)
    monkeypatch.setattr(saver, "_FEW_STEPS", 2)
    ended = worlds.run(2, partial(train, tmp_path / "r", Ends(8, [1]), save_every=5, log_every=2, quiet=False))
    assert "step 8 was saved" in ended[0].output and "those of this rank only (of_rank)" in ended[0].output
    [said, _] = worlds.run(2, partial(train, tmp_path / "r", log_every=2, quiet=False))
    assert "from step-000008" in said.output


def test_a_custom_loop_ends_with_the_losses_of_all_ranks(tmp_path: Path) -> None:
    def body(run: Path) -> None:
        trainer = tiny.classifier_trainer(run=str(run), strategy="ddp", log_every=2)
        for batch in trainer.loader(tiny.blobs()):
            trainer.training_step(batch)

    paceline.launch(partial(body, tmp_path / "2"), ranks=2)
    paceline.launch(partial(body, tmp_path / "1"), ranks=1)
    alone, together = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in "12"
    )
    assert [line["loss"] for line in together] == pytest.approx([line["loss"] for line in alone])
    assert len(together) == 3 and "of_rank" not in together[-1]


class Deletes:
    def __init__(self, run: Path, also: Path | None = None) -> None:
        self.run, self.also = run, also

    def on_step(self, record: Any) -> None:
        if record.step == 4 and paceline.dist.is_main():
            while not self._deleted():
                pass

    def _deleted(self) -> bool:
        """The thread that writes checkpoints may add a file while they are deleted, as under ``rm -r``: try again."""
        try:
            shutil.rmtree(self.run)
            if self.also is not None:
                self.also.write_text("in the way")
        except OSError:
            return False
        return True


@pytest.mark.parametrize("settings", [{}, {"save_every": None}])
def test_a_run_folder_that_was_deleted_is_created_again(
    tmp_path: Path, settings: dict[str, Any], whole: dict[tuple[int, bool], float]
) -> None:
    run = tmp_path / "r"
    ended = worlds.run(2, partial(train, run, Deletes(run), log_every=1, loggers=[], **settings))
    assert [each.status for each in ended] == [0, 0]
    assert ended[0].output.count("was deleted or moved") == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {(line["step"], line.get("evaluation", False)) for line in lines} == set(whole)
    assert (run / "config.yaml").exists() and (run / "checkpoints" / "step-000009").is_dir()


def test_a_run_folder_that_cannot_be_created_again_is_an_error(tmp_path: Path) -> None:
    run = tmp_path / "r"
    with pytest.raises(LaunchError) as caught:
        train(run, Deletes(run, also=run), log_every=1, strategy="single", loggers=[])
    assert caught.value.code == "launch.run-folder"
