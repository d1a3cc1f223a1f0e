from __future__ import annotations

import pytest

from paceline.train.rates import Interval


def test_on_a_cpu_all_of_the_time_at_the_loader_is_waiting() -> None:
    assert Interval(seconds=10.0, steps=100, waited=2.5).data_wait == 0.25
    assert Interval(seconds=0.0, steps=0, waited=0.0).data_wait == 0.0


@pytest.mark.parametrize("host, device, reading", [(5, 50, 60), (5, 50, 20), (20, 10, 30), (1, 100, 99), (5, 50, 45)])
@pytest.mark.parametrize("steps", [1, 10, 100])
def test_a_gpu_waits_only_when_its_queue_is_empty(host: float, device: float, reading: float, steps: int) -> None:
    """Simulated: the host reads a batch, then submits a step; the device begins with it at once, if it is idle."""
    clock = free = busy = 0.0
    for _ in range(steps):
        clock += reading
        begins = max(clock, free)
        clock += host
        free = max(begins + device, clock)
        busy += max(device, host)
    end = max(clock, free)
    found = Interval(end, steps, waited=reading * steps, synchronized=end - clock).data_wait
    idle = 1 - busy / end
    assert found == pytest.approx(max(0.0, idle), abs=0.02 + 1 / steps * (steps > 1))
    assert (found > 0.1) == (idle > 0.1)
