"""The runs of a page: what its list can show, search and sort."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_runs import make_run
from paceline.config.recipe import Config, effective
from paceline.tools.watch.watched_runs import WatchedRuns
from watched import HOSTILE, STEPS, evaluation, run_folder, step


def complete(runs: WatchedRuns) -> dict[str, Any]:
    """The list once all columns were read, by the name of the run."""
    while not all("settings" in run for run in runs.listed()["runs"]):
        runs.listed(known=1)
    return {run["name"]: run for run in runs.listed()["runs"]}


def test_columns_follow_the_lines(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=200, settings=["save_best=accuracy", "tags=[vit, baseline]", "optimizer.lr=0.1"])
    runs = WatchedRuns([], tmp_path)
    first = runs.listed()
    assert first["runs"][0]["state"] == "finished" and "settings" not in first["runs"][0], "the first answer is quick"
    later = runs.listed(first["version"])
    run = later["runs"][0]
    assert run["tags"] == ["vit", "baseline"] and run["curve"] == "eval/accuracy" and 2 < len(run["sparkline"]) <= 60
    assert run["settings"]["optimizer.lr"] == "0.1" and "precision" not in run["settings"], "defaults are sent once"
    assert later["defaults"]["precision"] == "fp32"
    assert run["best"]["eval/accuracy"] == (200, run["last"]["eval/accuracy"])
    assert run["last"]["loss"] == run["loss"] and run["best"]["loss"][1] <= run["loss"]
    assert runs.listed(later["version"])["runs"] == [{"id": run["id"]}], "nothing has changed"


def test_only_what_has_changed_is_sent_again(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name) for name in ("a", "b")]
    runs = WatchedRuns([], tmp_path)
    known = complete(runs)
    version = runs.listed()["version"]
    with folders[0].metrics.open("a") as file:
        file.write(json.dumps(step(11, loss=0.125)) + "\n")
    sent = [run for run in runs.listed(version)["runs"] if "name" in run]
    assert [(run["name"], run["loss"]) for run in sent] == [("a", 0.125)] and sent[0]["id"] == known["a"]["id"]


def test_a_default_that_differs_between_versions_counts_as_a_setting(tmp_path: Path) -> None:
    for name, epochs in (("old", 1), ("new", 2)):
        run_folder(tmp_path / name, config=f"epochs: {epochs}  # default\nseed: {epochs}  # recipe.yaml:1\n")
    runs = WatchedRuns([], tmp_path)
    listed = complete(runs)
    values = [{**runs.listed()["defaults"], **listed[name]["settings"]} for name in ("old", "new")]
    assert values == [{"epochs": "1", "seed": "1"}, {"epochs": "2", "seed": "2"}]


def test_without_evaluations_the_curve_is_the_loss(tmp_path: Path) -> None:
    config = effective(Config.from_dict({"save_best": "accuracy", "tags": "one"}))
    run_folder(tmp_path / "run", STEPS[:3], config=config)
    run_folder(tmp_path / "empty", [], config="[1, 2")
    listed = complete(WatchedRuns([], tmp_path))
    assert listed["run"]["curve"] == "loss" and listed["run"]["sparkline"] == [2.0, 1.0, 0.66666667]
    assert listed["run"]["tags"] == ["one"]
    assert (listed["empty"]["sparkline"], listed["empty"]["settings"], listed["empty"]["tags"]) == ([], None, [])


def test_values_are_plain_whatever_a_folder_contains(tmp_path: Path) -> None:
    text = json.dumps(HOSTILE)
    config = f"{text}: {text}\ntags: [{text}, 1, {{}}]\nsave_best:\n  metric: {text}\n  mode: {text}\n"
    records = [step(1, **{HOSTILE: 1.0}), evaluation(1, **{HOSTILE: 2.0}), {"step": 2, "loss": "NaN"}]
    run_folder(tmp_path / "run", records, config=config)
    run_folder(tmp_path / "other", config="tags: {a: b}\nsave_best: [1]\n")
    sent = json.dumps(complete(WatchedRuns([], tmp_path)), allow_nan=False, ensure_ascii=False)
    assert not [each for each in sent if each in "\x1b\x9b\x07\u202e\r\x00"] and "<script>" in sent
