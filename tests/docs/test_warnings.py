"""The table of warnings has the thresholds of the code."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from paceline.monitor import gpu_stats, stragglers
from paceline.plan import slow_input
from paceline.train import graph_step, standstill
from paceline.train.checks import split_invariance
from paceline.train.features import schedule

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "troubleshooting.md"


def test_the_table_of_warnings_has_their_thresholds() -> None:
    section = PAGE.read_text().partition("## When training warns")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+ \|$", section, re.M)[1:]
    silent = [row.split(" | ")[1].replace(" %", "%") for row in rows]
    rounding, slow = split_invariance._TOLERANCES, stragglers
    ranks = (
        f"{slow._SLOW:g} × the time of the others, {slow._NOTICEABLE:.0%} of a step, and {slow.LOST:g} s of all ranks "
        f"in total; at the end of training {slow.LOST:g} s and {slow.SHARE:.0%} of its time"
    )
    slices = (
        f"a relative difference of {rounding[torch.float32]:g} in fp32, {rounding[torch.float64]:g} in fp64 and "
        f"{split_invariance._HALF:.0%} in half precision"
    )
    assert silent == [
        ranks,
        f"{slow_input.NOTICEABLE:.0%} of {slow_input.WINDOW:g} s",
        f"{1 - gpu_stats._IDLE:.0%} of {gpu_stats.WINDOW * gpu_stats.SECONDS:g} s",
        f"{gpu_stats.THROTTLED * gpu_stats.SECONDS:g} of the last {gpu_stats.WINDOW * gpu_stats.SECONDS:g} s",
        f"a factor of {schedule.JUMP:g}, or {schedule.SMALL:.0%} of the highest rate",
        slices,
        f"{graph_step._EAGER} steps, and half of all",
        f"{standstill._WARN:.0%} of `timeout`",
    ]
