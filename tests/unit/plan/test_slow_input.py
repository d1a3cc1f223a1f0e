from __future__ import annotations

import pytest

from paceline.plan.slow_input import WINDOW, InputMonitor, InputSource, Interval, ReadTime, advice, enough

MEASURED = InputSource("dataset", 4, read=lambda: (0.0, 0.0))


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


@pytest.mark.parametrize("read, step, workers", [(0.08, 0.01, 10), (0.01, 0.01, 2), (0.001, 0.01, 1), (0.5, 0.1, 7)])
def test_enough_workers_read_faster_than_a_step_takes(read: float, step: float, workers: int) -> None:
    assert enough(read, step) == workers
    assert read / workers < step


def test_reading_in_the_training_process_is_the_time_that_it_waits() -> None:
    assert ReadTime(InputSource("dataset"), groups=2)(Interval(10.0, 100, waited=5.0)) == 0.05


def test_workers_measure_reading_and_those_of_others_are_busy_while_training_waits() -> None:
    sums = [(2.0, 10.0), (3.0, 30.0), (3.0, 30.0)]
    read = ReadTime(InputSource("dataset", 4, read=lambda: sums.pop(0)), groups=3)
    assert read(Interval(1.0, 10, waited=0.5)) == pytest.approx(3 * 0.05)
    assert read(Interval(1.0, 10, waited=0.5)) == pytest.approx(3 * 0.05)  # nothing was read: as before
    assert ReadTime(InputSource("loader", 4), groups=1)(Interval(1.0, 10, waited=0.5)) == pytest.approx(0.4)


def test_slow_input_is_reported_once_until_it_changes_a_lot() -> None:
    watch = InputMonitor(InputSource("dataset"), cores=64)

    def said(share: float, read: float = 0.08) -> str | None:
        return watch.add(WINDOW, 100, share, read)

    assert said(0.8) is None  # workers start
    first = said(0.8)
    assert first is not None and "80%" in first and "workers: 10 would be enough" in first
    assert [said(0.8), said(0.75), said(0.05)] == [None, None, None]
    again = said(0.8, read=0.32)
    assert again is not None and "workers: 40 would be enough" in again


def test_short_intervals_are_averaged() -> None:
    watch = InputMonitor(InputSource("dataset"), cores=64)
    found = [watch.add(WINDOW / 4, 10, share, 0.05) for share in (1.0, 0.0, 0.4, 0.4, 0.0)]
    assert found[:4] == [None] * 4 and found[4] is not None and "20% of the time" in found[4]


def test_workers_that_are_started_in_every_epoch_are_named_instead_of_more_workers() -> None:
    watch = InputMonitor(InputSource("loader", 4), cores=64)
    said = [watch.add(WINDOW, 5, 0.885, read=0.04, starting=0.88 * WINDOW) for _ in range(3)]
    assert said[0] is None and said[1] is not None and said[2] is None
    assert "88% of the time until 4 workers, which every epoch starts anew" in said[1]


def test_the_time_in_which_workers_start_is_no_time_of_reading() -> None:
    started = [7.0, 9.0]
    read = ReadTime(InputSource("loader", 4, started=lambda: started.pop(0)), groups=1)
    assert [read.starting(), read.starting()] == [7.0, 2.0]


@pytest.mark.parametrize("share, read", [(0.09, 0.08), (0.5, 0.0005)])
def test_short_waits_are_not_reported(share: float, read: float) -> None:
    watch = InputMonitor(InputSource("dataset"), cores=64)
    assert [watch.add(WINDOW, 100, share, read) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(
    "source, expected",
    [
        (InputSource("dataset"), "80 ms a step in the training process, the rest of a step 10 ms; workers: 10 would"),
        (InputSource("dataset", 4, read=MEASURED.read), "80 ms a step in each of 4 workers, the rest of a step 10 ms"),
        (InputSource("loader", 1), "in one worker, the rest of a step 10 ms; num_workers=10 of the DataLoader would"),
        (InputSource("stream", 1), "data.sharded: true and workers: 10"),
        (InputSource("batches"), "a DataLoader with num_workers=10"),
        (InputSource("dataset", 12, read=MEASURED.read), "more of them will not help"),
    ],
)
def test_the_advice_names_what_the_user_can_change(source: InputSource, expected: str) -> None:
    assert expected in advice(source, 64, share=0.5, read=0.08, step=0.01)


def test_more_workers_than_cores_help_only_while_reading_waits() -> None:
    text = advice(InputSource("dataset"), 4, share=0.5, read=0.08, step=0.01)
    assert "workers: 10 would be enough, unless reading keeps the CPU busy: 4 cores per rank would leave 50%" in text
    assert "unless" not in advice(InputSource("dataset"), 8, share=0.5, read=0.08, step=0.01)
