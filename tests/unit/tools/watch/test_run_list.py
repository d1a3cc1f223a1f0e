"""Lists of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.run.study_folder import StudyFolder
from paceline.tools.watch import run_list
from paceline.tools.watch.run_list import list_runs, table
from watched import FAILED, FINISHED, HOSTILE, START, run_folder, step


def folder_of_runs(root: Path) -> Path:
    run_folder(root / "old")
    run_folder(root / "new", [step(1), step(2, loss=None)], [(when + 100, *rest) for when, *rest in FAILED])  # type: ignore[misc]
    study = StudyFolder(root / "sweep")
    study.create()
    study.write_settings({})
    run_folder(study.trial(0).path)
    run_folder(study.trial(1).path, events=[(when - 50, *rest) for when, *rest in FAILED])  # type: ignore[misc]
    (root / "empty").mkdir()
    (root / "file").write_text("")
    return root


def test_runs_newest_first(tmp_path: Path) -> None:
    lines = list_runs(folder_of_runs(tmp_path))
    assert [line.name for line in lines] == ["new", "old", "sweep"]
    new, old, sweep = (line.row() for line in lines)
    assert new == ("new", "failed (ValueError on rank 1)", "2 of 10", "nan", "–")
    assert old == ("old", "finished", "10 of 10", "0.2", "1.0k samples/s")
    assert sweep == ("sweep", "study of 2 trials: 1 finished, 1 failed", "", "", "")
    assert table(lines).splitlines()[0].split() == ["run", "state", "step", "loss", "speed", "age"]


def test_trials_are_listed_on_request(tmp_path: Path) -> None:
    folder_of_runs(tmp_path)
    names = ["new", "old", "sweep", "sweep/trials/0000", "sweep/trials/0001"]
    assert [line.name for line in list_runs(tmp_path, trials=True)] == names
    assert [line.name for line in list_runs(tmp_path / "sweep")] == ["trials/0000", "trials/0001"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    found = [line.to_json() for line in list_runs(folder_of_runs(tmp_path))]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found[0]["kind"], found[0]["state"], found[0]["reason"], found[0]["loss"]) == (
        "run",
        "failed",
        "ValueError on rank 1",
        None,
    )
    assert found[2]["trials"] == {"finished": 1, "failed": 1}


def test_hostile_names_are_cleaned(tmp_path: Path) -> None:
    name = HOSTILE.replace("\0", "").replace("/", "")
    run_folder(tmp_path / name, events=[FINISHED[0], (START + 1, "failed", {"cause": HOSTILE})])
    run_folder(tmp_path / "\udcff")
    shown = table(list_runs(tmp_path))
    assert "\x1b" not in shown and "\r" not in shown and len(shown.splitlines()) == 3 and shown.encode()


def test_nothing_is_written_to_a_folder_that_is_read(tmp_path: Path) -> None:
    folder_of_runs(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    table(list_runs(tmp_path, trials=True))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs" / "gpt").checkpoints.mkdir()
    study = StudyFolder(tmp_path / "runs" / "sweep")
    study.create()
    study.write_settings({})
    run_folder(study.trial(0).path)
    study.trial_output(0).write_text("text")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "file").write_text("text")
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["gpt", "runs/gpt", "runs/gpt/", "runs/gpt/checkpoints", "gpt/checkpoints"])
def test_a_run_is_found(runs: Path, name: str) -> None:
    assert run_list.find_run(name).path == runs / "gpt"


def test_a_trial_is_found(runs: Path) -> None:
    assert run_list.find_run("sweep/trials/0000").path == runs / "sweep" / "trials" / "0000"


@pytest.mark.parametrize(
    "name", ["gtp", "runs/empty", "runs/file", "sweep", "x" * 5000, "a\0b", "/proc/1/root", HOSTILE]
)
def test_anything_else_is_an_error(runs: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        run_list.find_run(name)
    assert error.value.code == "checkpoint.no-run"
    assert "\x1b" not in str(error.value) and len(str(error.value)) < 500


def test_the_error_suggests_a_run(runs: Path) -> None:
    with pytest.raises(CheckpointError, match=r"did you mean 'gpt'\?"):
        run_list.find_run("gtp")
    with pytest.raises(CheckpointError, match=r"is a study.*\n.*runs/sweep/trials/0000"):
        run_list.find_run("sweep")


def test_what_a_folder_contains(runs: Path) -> None:
    assert run_list.run_paths(runs) == [runs / "gpt"] == run_list.run_paths(runs / "gpt")
    assert run_list.study_paths(runs) == [runs / "sweep"]
    assert run_list.trial_paths(runs / "sweep") == [runs / "sweep" / "trials" / "0000"]
    assert run_list.run_paths(runs / "missing") == []
