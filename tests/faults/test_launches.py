"""Launches that end badly: none hangs, none leaves a process, and each says what happened. benchmarks/launches.py has
3,500 of them."""

from __future__ import annotations

import sys

import pytest

from faults import launches
from samples import sample

SAMPLE = range(sample(8, 16))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, what ranks leave running stays")
def test_a_sample_of_launches_that_end_badly() -> None:
    with launches.adopting():
        problems = {number: launches.try_launch(launches.draw(number)) for number in SAMPLE}
    assert {number: problem for number, problem in problems.items() if problem} == {}


def test_one_launch_in_seven_is_of_a_script_and_most_have_two_ranks() -> None:
    drawn = [launches.draw(number) for number in range(3500)]
    assert sum(plan.kind == "script" for plan in drawn) == 500
    assert sum(plan.ranks == 2 for plan in drawn) > 2000
    assert {plan.signal for plan in drawn} == {"", "SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"}
    assert launches.draw(17) == launches.draw(17)
