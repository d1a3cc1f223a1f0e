from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run import folder


@pytest.mark.parametrize("by_path", [False, True])
def test_the_newest_run_is_the_one_with_the_largest_number(in_folder: Path, by_path: bool) -> None:
    name = str(in_folder / "runs" / "gpt") if by_path else "gpt"
    before = folder.newest(name)
    assert before is None
    for _ in range(10):
        made = folder.create(name)
        assert folder.newest(name) == before
        (made / "checkpoints").mkdir()
        before = made
    assert folder.newest(name) == in_folder / "runs" / "gpt-10"


def test_only_folders_that_a_run_has_begun_in_count(in_folder: Path) -> None:
    others = {"gpt-3": "notes.txt", "gpt-x": "config.yaml", "gpt-07": "config.yaml"}
    for name, inside in {"gpt": "config.yaml", **others}.items():
        (in_folder / "runs" / name).mkdir(parents=True)
        (in_folder / "runs" / name / inside).touch()
    (in_folder / "runs" / "gpt-9").touch()
    assert folder.newest("gpt") == in_folder / "runs" / "gpt"


def test_a_folders_name_is_without_the_number_that_making_it_gave(tmp_path: Path) -> None:
    first, second = folder.create(str(tmp_path / "r")), folder.create(str(tmp_path / "r"))
    assert second.name == "r-2"
    assert folder.name_of(first) == folder.name_of(second) == str(tmp_path / "r")
    alone = folder.create(str(tmp_path / "resnet-50"))
    assert folder.name_of(alone) == str(alone)
