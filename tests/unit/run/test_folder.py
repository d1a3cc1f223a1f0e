from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run.folder import RunFolder


@pytest.mark.parametrize("by_path", [False, True])
def test_the_newest_run_is_the_one_with_the_largest_number(in_folder: Path, by_path: bool) -> None:
    name = str(in_folder / "runs" / "gpt") if by_path else "gpt"
    before = RunFolder.newest(name)
    assert before is None
    for _ in range(10):
        made = RunFolder.create(name)
        assert RunFolder.newest(name) == before
        (made.path / "checkpoints").mkdir()
        before = made
    assert RunFolder.newest(name) == RunFolder(in_folder / "runs" / "gpt-10")


def test_only_folders_that_a_run_has_begun_in_count(in_folder: Path) -> None:
    others = {"gpt-3": "notes.txt", "gpt-x": "config.yaml", "gpt-07": "config.yaml"}
    for name, inside in {"gpt": "config.yaml", **others}.items():
        (in_folder / "runs" / name).mkdir(parents=True)
        (in_folder / "runs" / name / inside).touch()
    (in_folder / "runs" / "gpt-9").touch()
    assert RunFolder.newest("gpt") == RunFolder(in_folder / "runs" / "gpt")


def test_a_folders_name_is_without_the_number_that_making_it_gave(tmp_path: Path) -> None:
    first, second = RunFolder.create(str(tmp_path / "r")), RunFolder.create(str(tmp_path / "r"))
    assert second.path.name == "r-2"
    assert first.requested_name == second.requested_name == str(tmp_path / "r")
    alone = RunFolder.create(str(tmp_path / "resnet-50"))
    assert alone.requested_name == str(alone)


def test_the_newest_launch_is_one_that_ranks_were_started_in(in_folder: Path) -> None:
    assert RunFolder.newest_launch("gpt") is None
    first, second = RunFolder.create("gpt"), RunFolder.create("gpt")
    first.ledger.touch()
    second.config.touch()
    assert RunFolder.newest_launch("gpt") == first and RunFolder.newest("gpt") == second


def test_a_run_is_found_at_its_path_and_at_that_of_its_checkpoints(in_folder: Path) -> None:
    run = RunFolder.create("gpt")
    assert RunFolder.at("runs/gpt") is None  # nothing has started in it
    run.checkpoints.mkdir()
    assert RunFolder.at("runs/gpt") == RunFolder.at("runs/gpt/checkpoints") == run
    assert (run.short, str(run)) == ("runs/gpt", str(in_folder / "runs" / "gpt"))


def test_files_of_ranks_are_found_by_their_number(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.rank_log.existing() == {}
    run.logs.mkdir()
    for name in ("rank-0.log", "rank-10.log", "rank-x.log", "rank-1.txt", "failure-1.json"):
        (run.logs / name).touch()
    assert run.rank_log.existing() == {0: run.rank_log(0), 10: run.rank_log(10)}
    assert run.failure.existing() == {1: run.logs / "failure-1.json"}
