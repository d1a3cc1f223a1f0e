"""Ranks that the launcher starts again: they go on where they were, tell where the minutes went, and what they were at.

The launcher's part (variables, its lines in the ledger) is played by these tests.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from faults import worlds
from paceline.diagnose import goodput
from paceline.run import failures, heartbeat
from paceline.run.folder import RunFolder, short
from paceline.run.ledger import Ledger
from paceline.runtime import environment

STEPS, DIES_IN = 20, 17
CHECKPOINT = {"background": False, "on_error": False}  # so that it is known which is the last one


class Launch:
    """A folder of a launch, and starts of its ranks."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.ledger = folder, Ledger(folder)

    def start(self, generation: int, body: Callable[[], Any], ranks: int = 2, **variables: str) -> list[worlds.Ended]:
        """Once; the first death is noted as the launcher does it."""
        self.ledger.note("launched", nodes=1, ranks=ranks, generation=generation)
        failures.clear(self.folder, range(ranks), everything=True)
        told = {
            environment.LAUNCHED: "1",
            environment.RUN_FOLDER: str(self.folder),
            environment.LOG_FOLDER: str(self.folder),
            environment.RESTART_COUNT: str(generation),
            **variables,
        }

        def in_rank() -> Any:
            os.environ.update(told)
            return body()

        ended = worlds.run(ranks, in_rank)
        if any(each.status for each in ended):
            step = max(page.step for page in heartbeat.read(self.folder).values())
            self.ledger.note("failed", cause="signal", rank=1, step=step)
        else:
            self.ledger.note("ended", status=0)
        return ended


@pytest.fixture
def launch(in_folder: Path) -> Launch:
    return Launch(RunFolder.create("script"))


def training(
    run: str | None = "mine", dies_in: int | None = None, steps: int = STEPS, **changes: Any
) -> Callable[[], Any]:
    """A script that trains, in which the last rank is killed in the forward of a step."""

    def body() -> Any:
        settings = {"save_every": 7, "log_every": 1, "checkpoint": CHECKPOINT, "quiet": False, **changes}
        trainer = tiny.classifier_trainer(run=run, **settings)

        def die(*args: Any) -> None:
            if trainer.step_count + 1 == dies_in and not trainer.is_main_process:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.model.register_forward_pre_hook(die)
        began = trainer.step_count
        history = trainer.train(tiny.blobs(160), max_steps=steps)
        return {"began": began, "run": history.run, "weights": tiny.weights(trainer).tolist()}

    return body


def steps_in(run: str | Path) -> list[int]:
    return [json.loads(line)["step"] for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", ["mine", None])
def test_a_killed_training_resumes_in_its_folder_with_the_same_result(launch: Launch, run: str | None) -> None:
    began = time.time()
    broken = launch.start(0, training(run, DIES_IN))
    assert broken[1].status == -signal.SIGKILL and broken[0].status
    assert heartbeat.read(launch.folder)[1].trained == DIES_IN
    again = launch.start(1, training(run))
    seconds = time.time() - began
    told = again[0].value
    expected = launch.folder.path if run is None else launch.folder.path.with_name("mine")
    assert (told["began"], told["run"]) == (14, str(expected))
    assert f"start 2: resuming {short(expected)} from step-000014 (step 14)" in again[0].output
    assert steps_in(expected) == list(range(1, STEPS + 1))
    assert sorted(path.name for path in Path("runs").iterdir()) == sorted({"script", expected.name})
    unbroken = Launch(RunFolder.create("elsewhere/unbroken")).start(0, training("whole"))
    assert told["weights"] == unbroken[0].value["weights"]

    found = goodput.summarize(launch.folder)
    assert (found.steps, found.lost_steps) == (STEPS, DIES_IN - 1 - 14)
    assert 0 < found.training < found.total and found.lost > 0 and found.start > 0 and found.saves > 0
    assert found.total == pytest.approx(seconds, rel=0.05)


def test_a_restart_before_the_first_save_begins_as_the_first_start_did(launch: Launch, in_folder: Path) -> None:
    worlds.values(1, training("old", steps=2))
    given = str(in_folder / "runs" / "old" / "checkpoints" / "step-000002")
    launch.start(0, training(dies_in=5, resume=given), ranks=2)
    told = launch.start(1, training(resume=given, steps=8))[0].value
    assert (told["began"], told["run"]) == (2, str(in_folder / "runs" / "mine"))
    assert steps_in(told["run"]) == [3, 4, 5, 6, 7, 8]
    assert goodput.summarize(launch.folder).lost_steps == 2


def test_each_training_of_a_script_finds_its_own_folder_again(launch: Launch) -> None:
    """One that was done has nothing to do; the next one, of the same kind, goes on."""

    def script(dies_in: int | None) -> Callable[[], Any]:
        return lambda: [training(None, steps=8)(), training(None, dies_in, steps=9)()]

    launch.start(0, script(8))
    first, second = launch.start(1, script(None))[0].value
    assert (first["began"], second["began"]) == (8, 7)
    assert first["run"] == str(launch.folder) and second["run"] == str(launch.folder.part(2))
    assert steps_in(second["run"]) == list(range(1, 10))


def test_a_start_that_is_not_a_restart_creates_a_new_folder(launch: Launch) -> None:
    runs = [
        each.start(0, training("mine", steps=2), ranks=1)[0].value
        for each in (launch, Launch(RunFolder.create("script")))
    ]
    assert [(Path(told["run"]).name, told["began"]) for told in runs] == [("mine", 0), ("mine-2", 0)]


@pytest.mark.parametrize(("step", "accumulate"), [(13, 1), (13, 2), (1, 1)])
def test_a_suspected_step_leaves_the_ids_of_its_samples(launch: Launch, step: int, accumulate: int) -> None:
    """Ten steps are an epoch, and each has 16 of its 160 samples, on two ranks. The one that dies has come as far as
    its first micro-batch; in the first step that is in the pre-flight."""
    script = training(dies_in=step, accumulate=accumulate, micro_batch=8 // accumulate)
    launch.start(0, script, **{environment.SUSPECT_STEP: str(step)})
    suspects = heartbeat.read_suspects(launch.folder)
    found = {rank: (each.step, each.epoch, len(each.samples)) for rank, each in suspects.items()}
    assert found == {0: (step, step // 10, 8), 1: (step, step // 10, 8 // accumulate)}
    samples = {index for each in suspects.values() for index in each.samples}
    assert len(samples) == 8 + 8 // accumulate and samples <= set(range(160))


def test_samples_are_not_noted_unless_a_step_is_suspected(launch: Launch) -> None:
    launch.start(0, training(steps=2), ranks=1)
    assert heartbeat.read_suspects(launch.folder) == {}
