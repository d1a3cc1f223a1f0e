from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from paceline.data.read_clock import TimedReading


class Batches:
    name = "of the user"

    def __getitems__(self, keys: list[int]) -> list[int]:
        return keys


def unchanged(batch: Any) -> Any:
    return batch


def test_the_sums_of_workers_are_known_in_the_training_process() -> None:
    timed = TimedReading(Batches(), workers=2)
    keys = [[number] for number in range(6)]
    loader: Any = DataLoader(timed, batch_sampler=keys, num_workers=2, collate_fn=unchanged)
    assert list(loader) == keys
    seconds, batches = timed.read()
    assert batches == 6 and 0 < seconds < 60
    assert timed.name == "of the user"
