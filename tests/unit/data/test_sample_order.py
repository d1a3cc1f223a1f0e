from __future__ import annotations

from hypothesis import given, settings

import positions


@given(positions.data(), positions.starts())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_a_step_has_the_same_samples_whatever_ranks_read_the_steps_before_it(
    data: positions.Data, starts: list[positions.Start]
) -> None:
    positions.check(data, starts)
