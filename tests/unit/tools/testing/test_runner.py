"""The rank runner, tested as a user's tests would use it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from paceline import dist
from paceline.testing import RankFailure, ranks, run_on_ranks


@ranks(2)
def test_a_test_runs_in_a_group_with_the_debug_switch_on() -> None:
    assert (dist.world(), dist.is_initialized(), torch.distributed.get_backend()) == (2, True, "gloo")


def test_a_failure_on_one_rank_is_shown_with_its_output() -> None:
    def body() -> None:
        print("words of rank", dist.rank())
        dist.barrier()  # both are there: rank 0 has nothing more to do when rank 1 fails
        assert dist.rank() == 0, "not me"

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, body)
    text = str(caught.value)
    assert text.index("rank 1: failed") < text.index("rank 0: passed")
    assert "AssertionError: not me" in text and "words of rank 1" in text


def test_a_rank_that_hangs_is_ended() -> None:
    def body() -> None:
        if dist.rank() == 1:
            dist.barrier()

    with pytest.raises(RankFailure, match="rank 1"):
        run_on_ranks(2, body, timeout=2.0)


def test_a_hang_of_every_rank_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 1: still running, killed"):
        run_on_ranks(2, signal.pause, timeout=2.0)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 0: exited with code 9"):
        run_on_ranks(1, lambda: os._exit(9))
