from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SubsetRandomSampler

from paceline.data.adopt import batch_of, recognize
from paceline.data.iterable import ReadyBatches
from paceline.data.loader import DataShard
from paceline.errors import DataError
from reading import Numbers, Stream, micros, samples_by_step, spec_for


def test_a_plain_dataloader_is_rebuilt_in_our_order_with_its_own_collate() -> None:
    loader = DataLoader(Numbers(20), batch_size=5, shuffle=True, collate_fn=lambda items: torch.stack(items) * 10)
    assert batch_of(loader, DataShard(0, 2)) == (5, False)
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


def test_a_sampler_inside_a_plain_batch_sampler_is_honoured() -> None:
    batches = BatchSampler(SubsetRandomSampler([1, 2, 3, 4, 5]), 2, drop_last=True)
    steps = samples_by_step(DataLoader(Numbers(12), batch_sampler=batches), 1, batch=2)
    assert [len(step) for step in steps] == [2, 2]
    assert {x for step in steps for x in step} <= {1, 2, 3, 4, 5}


def test_a_distributed_sampler_inside_a_batch_sampler_is_seen() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 2, False))
    assert [m.batch.tolist() for m in micros(loader, spec_for(4, 1, 2))] == [[1, 3], [5, 7]]


def test_an_evaluation_honours_a_sampler_that_selects_a_subset() -> None:
    loader = DataLoader(Numbers(12), batch_size=4, sampler=SubsetRandomSampler([0, 1, 7]))
    assert sorted(x for step in samples_by_step(loader, 2, batch=4, training=False) for x in step) == [0, 1, 7]


def test_an_evaluation_takes_each_sample_once_from_loaders_made_for_training() -> None:
    for loader in (
        DataLoader(Numbers(11), batch_size=4, shuffle=True, drop_last=True),
        DataLoader(Numbers(11), batch_size=4, sampler=DistributedSampler(Numbers(11), num_replicas=2, rank=0)),
    ):
        steps = samples_by_step(loader, 2, batch=4, training=False)
        assert sorted(x for step in steps for x in step) == list(range(11))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (Numbers(0), "data.empty"),
        (Numbers(3), "data.smaller-than-batch"),
        (Stream(0), "data.empty"),
        (iter(()), "data.empty"),
        (42, "data.not-data"),
        ("data.csv", "data.not-data"),
        (Numbers, "data.not-data"),
        ((torch.ones(9, 2), torch.ones(9)), "data.not-data"),
        ([["a", "b"]], "data.no-length"),
    ],
)
def test_unsupported_data_has_a_code(data: Any, code: str) -> None:
    with pytest.raises(DataError) as caught:
        micros(data, spec_for())
    assert caught.value.code == code


def test_an_evaluation_takes_fewer_samples_than_a_batch() -> None:
    assert len(micros(Numbers(3), spec_for(training=False))) == 1


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_without_a_length_is_told_to_define_it() -> None:
    with pytest.raises(DataError, match="got Unsized without __len__") as caught:
        recognize(Unsized(), 0)
    assert "define __len__" in caught.value.fix


def test_batches_in_a_tuple_are_data() -> None:
    assert isinstance(recognize((torch.ones(4, 2), torch.ones(4, 2)), 0), ReadyBatches)
