from __future__ import annotations

from pathlib import Path

import pytest

from hiding import a_folder_to_hide, hide
from paceline import dist
from paceline.errors import LaunchError
from paceline.runtime.shared_storage import ranks_without_access
from worlds import ranks, run_on_ranks


def test_ranks_that_do_not_see_the_folder_are_known_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_folder_to_hide(tmp_path)
    monkeypatch.setattr("paceline.runtime.shared_storage._SECONDS_BETWEEN_ATTEMPTS", 0.0)

    def body() -> None:
        assert ranks_without_access(folder) == []
        if dist.rank() == 1:
            hide(folder)
        assert ranks_without_access(folder) == [1]

    run_on_ranks(3, body)
    assert list(folder.iterdir()) == []


def test_a_rank_alone_sees_its_folder(tmp_path: Path) -> None:
    assert ranks_without_access(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_a_missing_folder_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"launch.run-folder.*No such file"):
        ranks_without_access(tmp_path / "none")
