"""An error of one rank is raised on every rank."""

from __future__ import annotations

import errno
import os

import pytest
import torch.distributed as torch_dist

from paceline import dist
from paceline.errors import CheckpointError, DataError, PacelineError
from paceline.runtime.rank_errors import Report, capture_error, run_on_all_ranks, run_on_first_rank
from worlds import ranks


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
