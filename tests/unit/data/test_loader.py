from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.loader import TimedReading
from reading import Noisy, Numbers, micros, samples_by_step, spec_for


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 3])
def test_every_sample_is_used_exactly_once_an_epoch(ranks: int, groups: int) -> None:
    steps = samples_by_step(Numbers(47), ranks, groups=groups, epochs=2)
    assert sorted(x for step in steps[:5] for x in step) == list(range(47))
    assert sorted(x for step in steps[5:] for x in step) == list(range(47))


def test_each_step_holds_the_same_samples_on_any_number_of_ranks() -> None:
    reference = [sorted(step) for step in samples_by_step(Numbers(47), 1)]
    for ranks in (2, 3, 4):
        assert [sorted(step) for step in samples_by_step(Numbers(47), ranks)] == reference


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")  # torch would advise against it here
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_neither_order_nor_randomness(workers: int) -> None:
    alone = [micro.batch for micro in micros(Noisy(23), spec_for(5), epochs=2)]
    helped = [micro.batch for micro in micros(Noisy(23), spec_for(5, workers=workers), epochs=2)]
    assert len(alone) == len(helped) == 10
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True))


def test_a_sample_is_the_same_on_any_rank_and_differs_in_the_next_epoch() -> None:
    def looks(ranks: int, epoch: int) -> dict[int, list[float]]:
        rows = [
            row
            for rank in range(ranks)
            for micro in micros(Noisy(12), spec_for(6, rank, ranks), epochs=2)
            if micro.epoch == epoch and micro.samples
            for row in micro.batch.tolist()
        ]
        return {int(row[0]): row[1:] for row in rows}

    assert looks(1, 0) == looks(3, 0)
    assert all(looks(1, 0)[index] != looks(1, 1)[index] for index in range(12))


def test_reading_data_leaves_the_models_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    micros(Noisy(12), spec_for(6))
    assert torch.equal(torch.rand(4), expected)


def test_resume_at_any_step_reads_what_comes_next() -> None:
    whole = micros(Numbers(23), spec_for(5, groups=2), epochs=3)
    for first in range(15):
        rest = micros(Numbers(23), spec_for(5, groups=2), first, epochs=3)
        expected = [micro for micro in whole if micro.step >= first]
        assert [(m.step, m.epoch, m.batch.tolist()) for m in rest] == [
            (m.step, m.epoch, m.batch.tolist()) for m in expected
        ]


def test_a_rank_without_samples_joins_with_weight_zero() -> None:
    shares = [micros(Numbers(2), spec_for(2, rank, 3))[0] for rank in range(3)]
    assert sorted(micro.samples for micro in shares) == [0, 1, 1]
    assert all(len(micro.batch) == 1 for micro in shares)


def test_a_collate_function_that_draws_does_not_depend_on_workers() -> None:
    def jitter(items: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([item[0] for item in items]) + torch.rand(())

    def batches(workers: int) -> list[list[float]]:
        data = TensorDataset(torch.arange(12.0))
        loader = DataLoader(data, batch_size=4, collate_fn=jitter, num_workers=workers)
        return [m.batch.tolist() for m in micros(loader, spec_for(4), epochs=2)]

    assert batches(0) == batches(1) == batches(2)


def test_a_worker_init_function_finds_the_users_dataset() -> None:
    class Tagged(Numbers):
        tag = "mine"

    def check(worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        assert type(info.dataset) is Tagged and info.dataset.tag == "mine"

    loader = DataLoader(Tagged(8), batch_size=4, num_workers=1, worker_init_fn=check)
    assert len(micros(loader, spec_for(4))) == 2


class Batches:
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
