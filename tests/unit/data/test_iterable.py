from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline.data.adopt import adopt, batch_of
from paceline.data.iterable import ReadyBatches
from paceline.data.loader import DataShard
from paceline.errors import DataError
from reading import Numbers, Stream, micros, samples_by_step, spec_for


def test_the_batches_of_a_distributed_sampler_are_used_unchanged() -> None:
    said: list[str] = []
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(Numbers(12), num_replicas=2, rank=rank, shuffle=True)
        loader = DataLoader(Numbers(12), batch_size=3, sampler=sampler)
        assert batch_of(loader, DataShard(rank, 2)) == (3, True)
        for micro in adopt(loader, spec_for(6, rank, ranks=2), said.append).micros(0, 2):
            assert (micro.samples, micro.step_samples, micro.exact) == (3, 6, False)
            seen.append((micro.epoch, tuple(micro.batch.tolist())))
    assert sorted(x for epoch, own in seen if epoch == 0 for x in own) == list(range(12))
    assert {own for epoch, own in seen if epoch == 0} != {own for epoch, own in seen if epoch == 1}
    assert "DistributedSampler" in said[0]


def test_an_iterable_dataset_is_told_the_epoch() -> None:
    class Told(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.arange(3) + 10 * self.epoch

    assert samples_by_step(Told(3), 1, batch=3, epochs=2) == [[0, 1, 2], [10, 11, 12]]


def test_uneven_ranks_of_a_distributed_sampler_have_the_same_step_size() -> None:
    """What backwards are seeded with must be equal on all ranks, whatever each of them holds."""
    sampler = DistributedSampler(Numbers(10), num_replicas=2, rank=0, shuffle=False)
    loader = DataLoader(Numbers(10), batch_size=3, sampler=sampler)
    assert [(m.samples, m.step_samples) for m in micros(loader, spec_for(6, 0, 2))] == [(3, 6), (2, 6)]


def test_the_batches_of_a_distributed_sampler_are_sliced_into_accumulation_groups() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(Numbers(8), batch_size=4, sampler=sampler)
    cuts = micros(loader, spec_for(8, 1, 2, groups=2))
    assert [(m.batch.tolist(), m.start, m.step_samples, m.last) for m in cuts] == [
        ([1, 3], 4, 8, False), ([5, 7], 6, 8, True),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_iterable_dataset_is_seen_once_over_all_ranks(ranks: int) -> None:
    steps = samples_by_step(Stream(25), ranks, groups=2, epochs=2)
    assert [sorted(step) for step in steps] == [list(range(10)), list(range(10, 20)), list(range(20, 25))] * 2


def test_an_iterable_dataset_that_shuffles_is_one_stream_for_all_ranks() -> None:
    alone = samples_by_step(Stream(20, shuffled=True), 1, epochs=2)
    assert alone[:2] != alone[2:]
    assert [sorted(step) for step in samples_by_step(Stream(20, shuffled=True), 2, epochs=2)] == [
        sorted(step) for step in alone
    ]


def test_a_resumed_iterable_dataset_skips_what_was_used() -> None:
    rest = micros(Stream(25), spec_for(10), first=4, epochs=2)
    assert [(m.step, m.epoch, m.batch.tolist()) for m in rest] == [
        (4, 1, list(range(10, 20))), (5, 1, list(range(20, 25))),
    ]  # fmt: skip


def test_drop_last_of_an_iterable_datasets_loader_is_honoured() -> None:
    loader = DataLoader(Stream(25), batch_size=10, drop_last=True)
    assert [len(step) for step in samples_by_step(loader, 2)] == [10, 10]


def test_ready_batches_that_are_shuffled_are_the_same_on_every_rank() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(24).reshape(6, 4)), batch_size=None, shuffle=True)

    def seen(rank: int) -> list[list[int]]:
        torch.manual_seed(rank)  # as the Trainer does
        return [m.batch[0].tolist() for m in micros(loader(), spec_for(4, rank, 2))]

    together = [sorted(a + b) for a, b in zip(seen(0), seen(1), strict=True)]
    assert sorted(together) == torch.arange(24).reshape(6, 4).tolist()


def test_an_unbatched_iterable_dataset_gives_ready_batches() -> None:
    class Pairs(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.arange(4)
            yield torch.arange(4, 8)

    steps = samples_by_step(DataLoader(Pairs(), batch_size=None), 2)
    assert [sorted(step) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ready_batches_are_sliced_by_rank() -> None:
    batches = [(torch.arange(7), torch.ones(7)), (torch.arange(7, 12), torch.ones(5))]
    steps = samples_by_step(batches, 3)
    assert [sorted(step) for step in steps] == [list(range(7)), list(range(7, 12))]
    unbatched = DataLoader(TensorDataset(torch.arange(8).reshape(2, 4)), batch_size=None)
    assert [sorted(step) for step in samples_by_step(unbatched, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_iterable_of_samples_is_refused() -> None:
    with pytest.raises(DataError, match=r"yields samples, not batches"):
        ReadyBatches(((torch.zeros(8), torch.tensor(1)) for _ in range(4)), seed=0)
