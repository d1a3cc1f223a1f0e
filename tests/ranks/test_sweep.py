"""Sweeps as a user runs them, on this machine.

What a sweep does with its trials is shown with trials that are functions; those of recipes cost a training each.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import forked
import paceline
import searching
from nodes import eventually
from paceline.run import ledger
from paceline.run.folder import RunFolder
from paceline.run.study_folder import StudyFolder, values
from paceline.tools.search.study import Study
from samples import sample

SMALL = {
    "model": {"name": "mlp", "inputs": 64, "width": 16},
    "data": {"name": "shapes", "size": 8, "channels": 1, "length": 256},
    "batch": 32,
    "schedule": "cosine",
    "train": {"max_steps": 18},
    "eval_every": 3,
    "device": "cpu",
}
LR = "optimizer.lr=log(1e-4,1e-1)"


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    searching.preload()


def write(folder: Path, **changes: Any) -> str:
    (folder / "small.yaml").write_text(yaml.safe_dump({**SMALL, **changes}))
    return "small.yaml"


def searched(folder: Path, *words: str) -> Any:
    return forked.paceline("sweep", write(folder), *words, cwd=folder)


def study_of(folder: Path, name: str = "small-sweep") -> Study:
    return Study.load(StudyFolder(folder / "runs" / name))


def test_a_sweep_finds_the_best_trial_and_the_same_command_adds_nothing(tmp_path: Path) -> None:
    words = ("--trials", "4", "--parallel", "2", "--sampler", "random", LR, "batch=choice(16,32)")
    done = searched(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    study = study_of(tmp_path)
    assert [trial.state for trial in study.trials()] == ["complete"] * 4
    assert study.best is not None and study.best.value == min(trial.value or 9.0 for trial in study.trials())
    for trial in study.trials():
        assert trial.value == values(study.folder.trial(trial.number), "loss")[-1][1]
        assert trial.steps == 18 and sorted(trial.values) == [3, 6, 9, 12, 15, 18]
    assert f"best recipe: {Path('runs/small-sweep/best.yaml')}" in done.stdout
    best = paceline.Config.from_file(study.folder.best_recipe)
    assert best.optimizer.lr == study.best.params["optimizer.lr"] and best.batch == study.best.params["batch"]
    again = searched(tmp_path, *words)
    assert again.returncode == 0 and "4 of which have ended" in again.stderr
    launches = [
        event for n in range(4) for event in ledger.events(study.folder.trial(n)) if event["event"] == "launched"
    ]
    assert len(launches) == 4


def test_a_promoted_trial_continues_with_the_same_bits(tmp_path: Path) -> None:
    words = ("--trials", "9", "--parallel", "2", "--sampler", "random", LR, "--pruner", "asha")
    done = searched(tmp_path, *words, "--name", "asha")
    assert done.returncode == 0, done.stderr
    asha = study_of(tmp_path, "asha")
    complete = [trial for trial in asha.trials() if trial.state == "complete"]
    assert complete and {trial.state for trial in asha.trials()} == {"complete", "paused"}
    for trial in complete:
        assert trial.attempts == 4 and set(trial.rung_values) == {0, 1, 2}
    for trial in complete[: sample(1, 9)]:
        run = f"whole-{trial.number}"
        words = (f"optimizer.lr={trial.params['optimizer.lr']!r}", f"run={run}")
        whole = forked.paceline("train", "small.yaml", "-n", "1", *words, cwd=tmp_path)
        assert whole.returncode == 0, whole.stderr
        assert trial.value == values(RunFolder(tmp_path / "runs" / run), "loss")[-1][1]
    assert {trial.steps for trial in asha.trials()} <= {2, 4, 9, 18}
    assert sum(trial.steps for trial in asha.trials()) <= 0.5 * 9 * SMALL["train"]["max_steps"]


@pytest.mark.nightly
def test_trials_have_the_ranks_that_they_asked_for(tmp_path: Path) -> None:
    done = searched(tmp_path, "-n", "2", "--trials", "2", "--sampler", "random", LR)
    assert done.returncode == 0, done.stderr
    for number in range(2):
        events = ledger.events(study_of(tmp_path).folder.trial(number))
        assert [event["ranks"] for event in events if event["event"] == "launched"] == [2]


def test_a_trial_that_can_not_succeed_fails_with_its_verdict(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    words = ("--trials", "3", "--sampler", "grid", "optimizer.lr=choice(1e-3,1e30,1e-2)", "optimizer.name=sgd")
    done = forked.paceline("sweep", recipe, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, failed, last = study_of(tmp_path).trials()
    assert (first.state, failed.state, last.state) == ("complete", "failed", "complete")
    assert failed.attempts == 1 and "train.nonfinite: Non-finite loss" in failed.verdict
    assert f"trial 1 failed: {failed.verdict}" in done.stdout


def test_a_search_without_a_result_is_an_error(in_folder: Path) -> None:
    calls = in_folder / "calls"

    def fails(trial: Any) -> float:
        with calls.open("a") as file:
            file.write("x")
        raise ValueError("no luck")

    study = paceline.sweep(fails, {"x": "uniform(0, 1)"}, trials=6, sampler="random")
    assert calls.read_text() == "xxx" and [trial.state for trial in study.trials()] == ["failed"] * 3
    assert all("ValueError: no luck" in trial.verdict for trial in study.trials())
    with pytest.raises(paceline.errors.SearchError, match=r"search\.all-failed.*All 3 trials failed"):
        study.require_success()


@pytest.mark.nightly
def test_a_search_without_a_result_is_an_error_of_the_command(tmp_path: Path) -> None:
    done = searched(
        tmp_path, "--trials", "6", "--sampler", "random", "optimizer.name=sgd", "optimizer.lr=log(1e29,1e30)"
    )
    assert done.returncode == 2 and "[search.all-failed] All 3 trials failed" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["optimizer.lrr=log(1e-4,1e-1)"], "config.unknown-key"),
        (["model.widht=int(1,2)"], "model."),
        (["batch=int(0,4)"], "config.bad-value"),
        (["batch=choice()"], "search.bad-space"),
        (["optimizer.lr=log(1e-1,1e-4)"], "search.bad-space"),
        (["run=choice(a,b)"], "search.bad-space"),
        ([], "search.no-space"),
        ([LR, "--sampler", "grid"], "search.bad-space"),
        ([LR, "--metric", "acuracy"], "search.no-metric"),
        ([LR, "--sampler", "best"], "config.bad-value"),
    ],
)
def test_a_bad_search_is_an_error_before_anything_starts(tmp_path: Path, words: list[str], code: str) -> None:
    done = searched(tmp_path, *words)
    assert done.returncode == 2 and f"[{code}" in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


LONG = ("--sampler", "random", LR, "data.length=8192", "train.max_steps=600", "save_every=50", "eval_every=200")


def start(folder: Path, *words: str) -> int:
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        return forked.start(lambda: forked.command("sweep", "small.yaml", *words), folder, null, null)
    finally:
        os.close(null)


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def wait_for_checkpoint(trial: RunFolder) -> None:
    eventually(trial.latest.exists, seconds=60)


def launcher_of(process: int) -> psutil.Process:
    [launcher] = psutil.Process(process).children()
    return launcher


def blocks_at_first(trial: Any) -> float:
    """Waits to be killed, unless it was before."""
    first = Path(f"{trial.number}-was-here")
    if not first.exists():
        first.touch()
        signal.pause()
    return float(trial["x"])


def start_blocking() -> int:
    """In the working folder, a sweep over three trials."""
    null = os.open(os.devnull, os.O_WRONLY)

    def search() -> None:
        paceline.sweep(blocks_at_first, {"x": "uniform(0, 1)"}, trials=3, sampler="random", name="killed")

    try:
        return forked.start(search, Path.cwd(), null, null)
    finally:
        os.close(null)


def test_a_sweep_goes_on_after_kills(in_folder: Path) -> None:
    process = start_blocking()
    eventually((in_folder / "0-was-here").exists)
    os.kill(process, signal.SIGKILL)
    assert status_of(process) == -signal.SIGKILL
    process = start_blocking()
    eventually((in_folder / "1-was-here").exists)
    launcher_of(process).kill()
    eventually((in_folder / "2-was-here").exists)
    next(each for each in launcher_of(process).children(recursive=True) if each.name() == "pl-rank-0").kill()
    assert status_of(process) == 0
    trials = study_of(in_folder, "killed").trials()
    assert [(each.state, each.attempts, each.accidents) for each in trials] == [
        ("complete", 2, 0), ("complete", 2, 1), ("complete", 2, 1)
    ]  # fmt: skip
    assert [each.value for each in trials] == [each.params["x"] for each in trials]
    assert len({each.params["x"] for each in trials}) == 3


@pytest.mark.nightly
def test_a_sweep_over_a_recipe_goes_on_after_kills_with_the_same_bits(tmp_path: Path) -> None:
    words = ("--trials", "3", *LONG)
    whole = searched(tmp_path, *words, "--name", "whole")
    assert whole.returncode == 0, whole.stderr
    words, folder = (*words, "--name", "killed"), StudyFolder(tmp_path / "runs" / "killed")
    process = start(tmp_path, *words)
    wait_for_checkpoint(folder.trial(0))
    os.kill(process, signal.SIGKILL)
    assert status_of(process) == -signal.SIGKILL
    process = start(tmp_path, *words)
    wait_for_checkpoint(folder.trial(1))
    launcher_of(process).kill()
    wait_for_checkpoint(folder.trial(2))
    next(each for each in launcher_of(process).children(recursive=True) if each.name() == "pl-rank-0").kill()
    assert status_of(process) == 0
    found, expected = study_of(tmp_path, "killed").trials(), study_of(tmp_path, "whole").trials()
    assert [(each.params, each.value) for each in found] == [(each.params, each.value) for each in expected]
    assert [(each.attempts, each.accidents) for each in found] == [(2, 0), (2, 1), (2, 1)]


def test_an_interrupted_sweep_saves_its_trials_and_works_on_its_study_alone(tmp_path: Path) -> None:
    write(tmp_path)
    process = start(tmp_path, "--trials", "1", *LONG, "train.max_steps=1000000")
    trial = StudyFolder(tmp_path / "runs" / "small-sweep").trial(0)
    wait_for_checkpoint(trial)
    launcher = launcher_of(process)
    other = forked.paceline("sweep", "small.yaml", "--trials", "1", *LONG, "train.max_steps=1000000", cwd=tmp_path)
    os.kill(process, signal.SIGTERM)
    assert status_of(process) == 143
    assert other.returncode == 2 and "[checkpoint.run-in-use]" in other.stderr
    assert not launcher.is_running()
    saved = [event["step"] for event in ledger.events(trial) if event["event"] == "saved"]
    assert saved[-1] % 50 or len(saved) > 1  # after the signal
    assert [each.state for each in study_of(tmp_path).trials()] == ["running"]


def test_a_function_is_searched_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def objective(trial: Any) -> float:
        if paceline.dist.rank() == 0:
            trial.report(1, 9.0)
        return float((trial["x"] - 0.5) ** 2 + paceline.dist.world())

    study = paceline.sweep(objective, {"x": "uniform(0, 1)"}, trials=3, ranks=2, sampler="random")
    assert [trial.state for trial in study.trials()] == ["complete"] * 3
    for trial in study.trials():
        assert trial.value == (trial.params["x"] - 0.5) ** 2 + 2
        assert trial.values == {1: 9.0, 2: trial.value}
    with pytest.raises(paceline.errors.SearchError, match=r"search\.needs-recipe"):
        paceline.sweep(objective, {"x": "uniform(0, 1)"}, pruner="asha")


def test_a_recipe_is_searched_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = paceline.sweep(SMALL, {"optimizer.lr": [1e-3, 1e-2]}, trials=2, sampler="grid", name="own", ranks=2)
    assert [trial.params["optimizer.lr"] for trial in study.trials()] == [1e-3, 1e-2]
    assert study.best is not None and study.folder.path == tmp_path / "runs" / "own"
    for number in range(2):
        events = ledger.events(study.folder.trial(number))
        assert [event["ranks"] for event in events if event["event"] == "launched"] == [2]


def test_show_prints_the_study_and_writes_a_page(in_folder: Path) -> None:
    paceline.sweep(lambda trial: trial["x"], {"x": "uniform(0, 1)"}, trials=2, sampler="random", name="small-sweep")
    shown = forked.paceline("sweep", "show", "small-sweep", "--html", cwd=in_folder)
    assert shown.returncode == 0, shown.stderr
    assert "2 trials: 2 complete" in shown.stdout and (in_folder / "runs/small-sweep/report.html").exists()
    missing = forked.paceline("sweep", "show", "other", cwd=in_folder)
    assert missing.returncode == 2 and "[search.no-study]" in missing.stderr
