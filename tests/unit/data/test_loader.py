from __future__ import annotations

import random
from collections import UserDict, defaultdict
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data.adopt import LoaderSpec, adopt, batch_of, look_at
from paceline.data.batches import apply, rows_of
from paceline.data.loader import DataShard, MicroBatch
from paceline.errors import DataError


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Noisy(Numbers):
    """Draws from all three generators that augmentations draw from."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, n: int, shuffled: bool = False) -> None:
        self.n, self.shuffled = n, shuffled

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.n) if self.shuffled else torch.arange(self.n)
        yield from order


def wish(batch: int = 10, rank: int = 0, ranks: int = 1, groups: int = 1, **changes: Any) -> LoaderSpec:
    values = {"seed": 0, "shuffle": True, "workers": 0, "pin_memory": False, **changes}
    return LoaderSpec(batch=batch, part=DataShard(rank, ranks, groups), **values)


def micros(data: Any, wished: LoaderSpec, first: int = 0, epochs: int = 1) -> list[MicroBatch]:
    return list(adopt(look_at(data, 0), wished, lambda text: None).micros(first, epochs))


def samples_by_step(data: Any, ranks: int, batch: int = 10, epochs: int = 1, **changes: Any) -> list[list[float]]:
    """The samples of each step, over all ranks; stand-ins (weight zero) left out."""
    steps: dict[int, list[float]] = {}
    for rank in range(ranks):
        for micro in micros(data, wish(batch, rank, ranks, **changes), epochs=epochs):
            own = micro.batch[0] if isinstance(micro.batch, (list, tuple)) else micro.batch
            steps.setdefault(micro.step, []).extend(own.tolist() if micro.samples else [])
    return [steps[step] for step in sorted(steps)]


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
    alone = [micro.batch for micro in micros(Noisy(23), wish(5), epochs=2)]
    helped = [micro.batch for micro in micros(Noisy(23), wish(5, workers=workers), epochs=2)]
    assert len(alone) == len(helped) == 10
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True))


def test_a_sample_looks_the_same_on_any_rank_and_another_way_in_the_next_epoch() -> None:
    def looks(ranks: int, epoch: int) -> dict[int, list[float]]:
        rows = [
            row
            for rank in range(ranks)
            for micro in micros(Noisy(12), wish(6, rank, ranks), epochs=2)
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
    micros(Noisy(12), wish(6))
    assert torch.equal(torch.rand(4), expected)


def test_resume_at_any_step_reads_what_comes_next() -> None:
    whole = micros(Numbers(23), wish(5, groups=2), epochs=3)
    for first in range(15):
        rest = micros(Numbers(23), wish(5, groups=2), first, epochs=3)
        expected = [micro for micro in whole if micro.step >= first]
        assert [(m.step, m.epoch, m.batch.tolist()) for m in rest] == [
            (m.step, m.epoch, m.batch.tolist()) for m in expected
        ]


def test_a_rank_without_samples_joins_with_weight_zero() -> None:
    shares = [micros(Numbers(2), wish(2, rank, 3))[0] for rank in range(3)]
    assert sorted(micro.samples for micro in shares) == [0, 1, 1]
    assert all(len(micro.batch) == 1 for micro in shares)


def test_a_plain_dataloader_is_rebuilt_in_our_order_with_its_own_collate() -> None:
    loader = DataLoader(Numbers(20), batch_size=5, shuffle=True, collate_fn=lambda items: torch.stack(items) * 10)
    assert batch_of(loader, ranks=2) == 5
    ours = samples_by_step(loader, 2, batch=5)
    assert [sorted(step) for step in ours] == [
        sorted(x * 10 for x in step) for step in samples_by_step(Numbers(20), 1, batch=5)
    ]


def test_a_dataloader_without_shuffle_keeps_the_natural_order() -> None:
    assert samples_by_step(DataLoader(Numbers(10), batch_size=4), 1, batch=4) == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9],
    ]  # fmt: skip


def test_drop_last_of_a_dataloader_is_honoured() -> None:
    assert len(samples_by_step(DataLoader(Numbers(10), batch_size=4, drop_last=True), 1, batch=4)) == 2


def test_a_distributed_samplers_batches_are_used_as_they_come() -> None:
    said: list[str] = []
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(Numbers(12), num_replicas=2, rank=rank, shuffle=True)
        loader = DataLoader(Numbers(12), batch_size=3, sampler=sampler)
        assert batch_of(loader, ranks=2) == 6
        for micro in adopt(loader, wish(6, rank, ranks=2), said.append).micros(0, 2):
            assert (micro.samples, micro.step_samples, micro.exact) == (3, 6, False)
            seen.append((micro.epoch, tuple(micro.batch.tolist())))
    assert sorted(x for epoch, own in seen if epoch == 0 for x in own) == list(range(12))
    assert {own for epoch, own in seen if epoch == 0} != {own for epoch, own in seen if epoch == 1}
    assert "DistributedSampler" in said[0]


def test_another_sampler_is_one_stream_of_indices_for_all_ranks() -> None:
    def loader() -> DataLoader[torch.Tensor]:
        sampler = WeightedRandomSampler([1.0] * 10 + [0.0] * 10, num_samples=16)
        return DataLoader(Numbers(20), batch_size=6, sampler=sampler)

    alone = samples_by_step(loader(), 1, batch=6, epochs=2)
    assert [sorted(step) for step in samples_by_step(loader(), 3, batch=6, epochs=2)] == [sorted(s) for s in alone]
    assert [len(step) for step in alone] == [6, 6, 4, 6, 6, 4]
    assert max(x for step in alone for x in step) < 10
    assert alone[:3] != alone[3:]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_batch_sampler_may_yield_arrays(kind: Any) -> None:
    class Arrays(Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield kind([0, 2, 4])
            yield kind([6])

    loader = DataLoader(Numbers(10), batch_sampler=Arrays())
    assert [sorted(step) for step in samples_by_step(loader, 2, batch=3)] == [[0, 2, 4], [6]]


def test_an_iterable_dataset_is_told_the_epoch() -> None:
    class Told(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.arange(3) + 10 * self.epoch

    assert samples_by_step(Told(3), 1, batch=3, epochs=2) == [[0, 1, 2], [10, 11, 12]]


def test_a_sampler_inside_a_plain_batch_sampler_is_honoured() -> None:
    batches = BatchSampler(SubsetRandomSampler([1, 2, 3, 4, 5]), 2, drop_last=True)
    steps = samples_by_step(DataLoader(Numbers(12), batch_sampler=batches), 1, batch=2)
    assert [len(step) for step in steps] == [2, 2]
    assert {x for step in steps for x in step} <= {1, 2, 3, 4, 5}


def test_a_distributed_sampler_inside_a_batch_sampler_is_seen() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 2, False))
    assert [m.batch.tolist() for m in micros(loader, wish(4, 1, 2))] == [[1, 3], [5, 7]]


def test_uneven_ranks_of_a_distributed_sampler_still_count_in_one_measure() -> None:
    """What backwards are seeded with must be equal on all ranks, whatever each of them holds."""
    sampler = DistributedSampler(Numbers(10), num_replicas=2, rank=0, shuffle=False)
    loader = DataLoader(Numbers(10), batch_size=3, sampler=sampler)
    assert [(m.samples, m.step_samples) for m in micros(loader, wish(6, 0, 2))] == [(3, 6), (2, 6)]


def test_a_distributed_samplers_batches_are_cut_into_groups_with_places_of_their_own() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(Numbers(8), batch_size=4, sampler=sampler)
    cuts = micros(loader, wish(8, 1, 2, groups=2))
    assert [(m.batch.tolist(), m.start, m.step_samples, m.last) for m in cuts] == [
        ([1, 3], 4, 8, False), ([5, 7], 6, 8, True),
    ]  # fmt: skip


def test_an_evaluation_honours_a_sampler_that_picks_a_part() -> None:
    loader = DataLoader(Numbers(12), batch_size=4, sampler=SubsetRandomSampler([0, 1, 7]))
    assert sorted(x for step in samples_by_step(loader, 2, batch=4, training=False) for x in step) == [0, 1, 7]


def test_an_evaluation_takes_each_sample_once_from_loaders_made_for_training() -> None:
    for loader in (
        DataLoader(Numbers(11), batch_size=4, shuffle=True, drop_last=True),
        DataLoader(Numbers(11), batch_size=4, sampler=DistributedSampler(Numbers(11), num_replicas=2, rank=0)),
    ):
        steps = samples_by_step(loader, 2, batch=4, training=False)
        assert sorted(x for step in steps for x in step) == list(range(11))


def test_a_sampler_with_a_generator_of_its_own_resumes_and_agrees() -> None:
    def loader() -> DataLoader[torch.Tensor]:
        generator = torch.Generator().manual_seed(random.randrange(1000))
        return DataLoader(
            Numbers(20), batch_size=5, sampler=WeightedRandomSampler([1.0] * 20, num_samples=10, generator=generator)
        )

    whole = [m.batch.tolist() for m in micros(loader(), wish(5), epochs=2)]
    assert [m.batch.tolist() for m in micros(loader(), wish(5), first=2, epochs=2)] == whole[2:]


def test_an_endless_sampler_is_read_as_it_is_asked() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return cycle(range(20))

    loader = DataLoader(Numbers(20), batch_size=6, sampler=Endless())
    stream = adopt(loader, wish(6), lambda text: None).micros(0, 1)
    assert [next(stream).batch.tolist() for _ in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_a_collate_function_that_draws_does_not_depend_on_workers() -> None:
    def jitter(items: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([item[0] for item in items]) + torch.rand(())

    def batches(workers: int) -> list[list[float]]:
        data = TensorDataset(torch.arange(12.0))
        loader = DataLoader(data, batch_size=4, collate_fn=jitter, num_workers=workers)
        return [m.batch.tolist() for m in micros(loader, wish(4), epochs=2)]

    assert batches(0) == batches(1) == batches(2)


def test_a_worker_init_function_finds_the_users_dataset() -> None:
    class Tagged(Numbers):
        tag = "mine"

    def check(worker: int) -> None:
        assert torch.utils.data.get_worker_info().dataset.tag == "mine"  # type: ignore[union-attr]

    loader = DataLoader(Tagged(8), batch_size=4, num_workers=1, worker_init_fn=check)
    assert len(micros(loader, wish(4))) == 2


def test_a_batch_samplers_lists_are_global_batches() -> None:
    class Evens(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield [0, 2, 4]
            yield [6, 8]

        def __len__(self) -> int:
            return 2

    loader = DataLoader(Numbers(10), batch_sampler=Evens(SequentialSampler(Numbers(10)), 3, False))
    assert [sorted(step) for step in samples_by_step(loader, 2, batch=3)] == [[0, 2, 4], [6, 8]]


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


def test_an_iterable_dataset_resumes_behind_what_was_used() -> None:
    rest = micros(Stream(25), wish(10), first=4, epochs=2)
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
        return [m.batch[0].tolist() for m in micros(loader(), wish(4, rank, 2))]

    together = [sorted(a + b) for a, b in zip(seen(0), seen(1), strict=True)]
    assert sorted(together) == torch.arange(24).reshape(6, 4).tolist()


def test_an_unbatched_iterable_dataset_gives_ready_batches() -> None:
    class Pairs(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.arange(4)
            yield torch.arange(4, 8)

    steps = samples_by_step(DataLoader(Pairs(), batch_size=None), 2)
    assert [sorted(step) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_are_cut_from_what_is_as_long_as_the_batch() -> None:
    batch = UserDict(x=torch.arange(6), names=list("abcdef"), weight=torch.ones(2), scale=torch.tensor(3.0))
    part = rows_of(batch, 2, 4)
    assert type(part) is UserDict
    assert (part["x"].tolist(), part["names"], len(part["weight"])) == ([2, 3], ["c", "d"], 2)
    assert batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    nested = apply(defaultdict(list, a=[torch.ones(2)]), lambda tensor: tensor * 2)
    assert nested["a"][0].tolist() == [2.0, 2.0] and nested["other"] == []


def test_ready_batches_are_cut_by_rank() -> None:
    batches = [(torch.arange(7), torch.ones(7)), (torch.arange(7, 12), torch.ones(5))]
    steps = samples_by_step(batches, 3)
    assert [sorted(step) for step in steps] == [list(range(7)), list(range(7, 12))]
    unbatched = DataLoader(TensorDataset(torch.arange(8).reshape(2, 4)), batch_size=None)
    assert [sorted(step) for step in samples_by_step(unbatched, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (Numbers(0), "data.empty"),
        (Numbers(3), "data.smaller-than-batch"),
        (Stream(0), "data.empty"),
        (iter(()), "data.empty"),
        (42, "data.not-data"),
        ([["a", "b"]], "data.no-length"),
    ],
)
def test_bad_data_has_a_code(data: Any, code: str) -> None:
    with pytest.raises(DataError) as caught:
        micros(data, wish())
    assert caught.value.code == code


def test_an_evaluation_takes_fewer_samples_than_a_batch() -> None:
    assert len(micros(Numbers(3), wish(training=False))) == 1
