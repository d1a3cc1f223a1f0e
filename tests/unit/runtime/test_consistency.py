from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist

from hiding import a_folder_to_hide, hide
from paceline import dist
from paceline.errors import CheckpointError, DataError, LaunchError, PacelineError, WorldError
from paceline.runtime.consistency import (
    Report,
    by_rank,
    capture_error,
    ranks_without_access,
    require_same_recipe,
    require_same_versions,
    require_same_weights,
    run_on_all_ranks,
    run_on_first_rank,
)
from worlds import ranks, run_on_ranks


def error_of(require: Any, *arguments: Any) -> WorldError:
    with pytest.raises(WorldError) as caught:
        require(*arguments)
    return caught.value


def test_equal_values_pass() -> None:
    recipe = {"batch": 8, "optimizer": {"lr": 0.1}}
    require_same_recipe([recipe, dict(recipe)])
    require_same_versions([{"torch": "2.9"}] * 3)
    require_same_weights([{"w": 1}, {"w": 1}])


def test_a_recipe_that_differs_names_the_key_and_the_ranks_with_each_value() -> None:
    recipes = [{"batch": 8, "optimizer": {"lr": lr}} for lr in (0.1, 0.2, 0.1)]
    error = error_of(require_same_recipe, recipes)
    assert error.code == "world.different-recipes"
    text = str(error)
    assert "optimizer.lr" in text and "batch" not in text
    assert "ranks 0, 2: 0.1" in text and "rank 1: 0.2" in text


def test_a_key_that_only_some_ranks_have_differs() -> None:
    assert "(not set)" in str(error_of(require_same_versions, [{"torch": "2.9", "ray": "2"}, {"torch": "2.9"}]))


def test_weights_name_a_few_parameters_and_count_all() -> None:
    names = [f"layer.{number:02}" for number in range(20)]
    error = error_of(require_same_weights, [dict.fromkeys(names, 1), dict.fromkeys(names, 2)])
    assert error.code == "world.different-weights" and "Replicas hold different weights" in str(error)
    assert "20 differences" in str(error) and "layer.07" in str(error) and "layer.08" not in str(error)


def test_ranks_with_the_same_value_share_a_line() -> None:
    assert by_rank(["a", "b", "a"], indent="") == "ranks 0, 2: a\nrank 1: b"


def not_saved(reason: str) -> PacelineError:
    return CheckpointError("not-saved", f"It was not written: {reason}.")


def full_disk() -> Report:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_has_a_code_keeps_it_and_what_has_none_gets_one() -> None:
    def coded() -> Report:
        raise DataError("no-length", "A batch without a length.", fix="count it")

    def uncoded() -> Report:
        raise ValueError("own")

    errors = [capture_error(work, not_saved)["error"] for work in (coded, full_disk, uncoded)]
    assert PacelineError.from_dict(errors[0]).code == "data.no-length" and errors[0]["fix"] == "count it"
    assert errors[1]["what"] == "It was not written: No space left on device."
    assert errors[2]["what"] == "It was not written: ValueError: own."
    assert capture_error(lambda: {"size": 3}, not_saved) == {"size": 3}


@ranks(3)
def test_the_first_ranks_result_and_its_error_reach_every_rank_of_a_group() -> None:
    ran: list[int] = []

    def work() -> Report:
        ran.append(dist.rank())
        return {"from": dist.rank()}

    assert run_on_first_rank(work, not_saved) == {"from": 0}
    later = torch_dist.new_group([1, 2])
    if dist.rank() > 0:
        assert run_on_first_rank(work, not_saved, later) == {"from": 1}
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            run_on_first_rank(full_disk, not_saved, later)
        assert caught.value.code == "checkpoint.not-saved"
    assert ran == [[0], [1], []][dist.rank()]


@ranks(3)
def test_a_rank_that_fails_raises_its_own_error_and_the_others_one_that_names_it() -> None:
    def work() -> int:
        if dist.rank() == 1:
            raise ValueError("own")
        if dist.rank() == 2:
            raise DataError("no-length", "A batch without a length.")
        return dist.rank()

    expected = [CheckpointError, ValueError, DataError][dist.rank()]
    with pytest.raises(expected) as caught:
        run_on_all_ranks(work, "Reading")
    if dist.rank() == 0:
        assert "Reading failed on rank 1: ValueError: own" in str(caught.value)
    assert run_on_all_ranks(dist.rank, "Reading") == dist.rank()


def test_ranks_that_do_not_see_the_folder_are_known_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_folder_to_hide(tmp_path)
    monkeypatch.setattr("paceline.runtime.consistency._SECONDS_BETWEEN_ATTEMPTS", 0.0)

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
