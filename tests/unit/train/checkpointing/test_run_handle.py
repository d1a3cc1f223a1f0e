from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from paceline.errors import CheckpointError

HOLDER = """
import sys
from pathlib import Path
from paceline.run.folder import RunFolder
from paceline.run.lock import RunLock
RunLock(RunFolder(Path(sys.argv[1]))).take()
print("held", flush=True)
sys.stdin.read()
"""


def test_two_jobs_cannot_resume_one_run(tmp_path: Path) -> None:
    run = tmp_path / "r"
    tiny.classifier_trainer(run=str(run)).train(tiny.blobs(), max_steps=2)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdin=-1, stdout=-1, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=rf"checkpoint.run-in-use.*process {holder.pid} "):
        tiny.classifier_trainer(run=str(run), resume="auto")
    holder.communicate()
    assert tiny.classifier_trainer(run=str(run), resume="auto").step_count == 2


def test_a_second_trainer_of_a_process_continues_when_the_first_has_ended(tmp_path: Path) -> None:
    first = tiny.classifier_trainer(run=str(tmp_path / "r"))
    first.train(tiny.blobs(), max_steps=2)
    second = tiny.classifier_trainer(run=str(tmp_path / "r"), resume="auto")
    with pytest.raises(CheckpointError, match=r"checkpoint.run-in-use.*another Trainer in this process"):
        first.train(tiny.blobs(), max_steps=4)
    assert second.train(tiny.blobs(), max_steps=4).run == str(tmp_path / "r")
    assert len(first.train(tiny.blobs(), max_steps=3).steps) == 1


def test_a_custom_loop_that_nobody_holds_does_not_share_its_run(in_folder: Path) -> None:
    """Whether Python has collected its Trainer must not matter: where the next one saves, and what it resumes."""

    def abandoned() -> None:
        trainer = tiny.classifier_trainer(run="loop", save_every=1)
        for batch in trainer.loader(tiny.blobs()):
            trainer.training_step(batch)

    gc.disable()
    try:
        abandoned()
        history = tiny.classifier_trainer(run="next", save_every=1).train(tiny.blobs(), max_steps=2)
        assert history.run == str(in_folder / "runs" / "next")
        abandoned()
        assert tiny.classifier_trainer(resume="runs/next").step_count == 2
        named = tiny.classifier_trainer(run=None).train(tiny.blobs(), max_steps=1).run
        assert Path(named or "").parent == in_folder / "runs"
    finally:
        gc.enable()


def test_auto_without_an_earlier_run_begins_one(tmp_path: Path) -> None:
    trainer = tiny.classifier_trainer(run=str(tmp_path / "r"), resume="auto")
    assert trainer.train(tiny.blobs(), max_steps=2).run == str(tmp_path / "r")
    again = tiny.classifier_trainer(run=str(tmp_path / "r"), resume="auto")
    assert again.step_count == 2 and again.train(tiny.blobs(), max_steps=3).run == str(tmp_path / "r")


def test_a_checkpoint_to_resume_from_begins_a_new_run(tmp_path: Path) -> None:
    tiny.classifier_trainer(run=str(tmp_path / "r"), save_every=2).train(tiny.blobs(), max_steps=3)
    one = str(tmp_path / "r" / "checkpoints" / "step-000002")
    trainer = tiny.classifier_trainer(run=str(tmp_path / "r"), resume=one)
    assert trainer.step_count == 2
    assert trainer.train(tiny.blobs(), max_steps=3).run == str(tmp_path / "r-2")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"run": False, "resume": "auto"}, "checkpoint.nothing-to-resume"),
        ({"run": False, "resume": "nowhere"}, "checkpoint.missing"),
    ],
)
def test_what_cannot_be_resumed_has_a_code(settings: dict[str, object], code: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tiny.classifier_trainer(**settings)
    assert caught.value.code == code


def test_a_run_all_of_whose_checkpoints_are_damaged_is_not_begun_again(tmp_path: Path) -> None:
    tiny.classifier_trainer(run=str(tmp_path / "r")).train(tiny.blobs(), max_steps=2)
    (tmp_path / "r" / "checkpoints" / "step-000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint.nothing-good.*step-000002"):
        tiny.classifier_trainer(run=str(tmp_path / "r"), resume="auto")


@pytest.mark.parametrize("change", [{"batch": 4}, {"seed": 3}, {"shuffle": False}], ids=str)
def test_a_position_that_means_other_samples_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    tiny.classifier_trainer(run=str(tmp_path / "r")).train(tiny.blobs(), max_steps=2)
    trainer = tiny.classifier_trainer(run=str(tmp_path / "r"), resume="auto", **change)
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        trainer.train(tiny.blobs(), max_steps=4)
    assert caught.value.code == "checkpoint.other-data"


def test_metrics_hold_every_step_once(tmp_path: Path) -> None:
    def run(steps: int) -> None:
        settings = {"save_every": 3, "save_last": False, "log_every": 2, "resume": "auto"}
        tiny.classifier_trainer(run=str(tmp_path / "r"), **settings).train(tiny.blobs(), max_steps=steps)

    run(5)
    run(8)  # from step 3
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert [int(line.partition('"step": ')[2].partition(",")[0]) for line in lines] == list(range(1, 9))
