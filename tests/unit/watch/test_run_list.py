"""Lists of runs."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.run.study_folder import StudyFolder
from paceline.watch.run_list import list_runs, table
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
    assert new == ("new", "failed (exception)", "2 of 10", "nan", "–")
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
        "exception",
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
