from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.errors import DataError
from reading import Stream, micros, spec_for


class ByWorker(IterableDataset[torch.Tensor]):
    """Twenty-five samples, split across workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        yield from torch.arange(25)[info.id :: info.num_workers] if info else torch.arange(25)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_read_parts_of_a_shard_as_in_a_plain_loop(workers: int) -> None:
    plain = [batch.tolist() for batch in DataLoader(ByWorker(), batch_size=4, num_workers=workers)]
    ours = micros(ByWorker(), spec_for(4, workers=workers, sharded=True))
    assert [micro.batch.tolist() for micro in ours] == plain
    assert [(micro.samples, micro.step_samples) for micro in ours] == [(len(batch),) * 2 for batch in plain]
    assert sorted(x for batch in plain for x in batch) == list(range(25))


def test_a_share_is_divided_into_groups_and_resumed() -> None:
    whole = micros(Stream(10), spec_for(4, groups=3, sharded=True), epochs=2)
    assert [(m.batch.tolist(), m.samples, m.start, m.last) for m in whole[:3]] == [
        ([0], 1, 0, False), ([1], 1, 1, False), ([2, 3], 2, 2, True),
    ]  # fmt: skip
    assert [m.samples for m in whole[6:9]] == [0, 1, 1]  # two samples left for three groups
    rest = micros(Stream(10), spec_for(4, groups=3, sharded=True), first=4, epochs=2)
    assert [(m.step, m.epoch, m.batch.tolist()) for m in rest] == [
        (m.step, m.epoch, m.batch.tolist()) for m in whole[12:]
    ]


def test_workers_that_read_the_same_samples_are_refused() -> None:
    with pytest.raises(DataError, match="get_worker_info") as caught:
        micros(Stream(20), spec_for(5, workers=2, sharded=True))
    assert caught.value.code == "data.same-samples"


def test_own_batches_are_divided_into_groups() -> None:
    batches = [torch.arange(5), torch.arange(5, 7)]
    cuts = micros(batches, spec_for(5, groups=2, sharded=True))
    assert [(m.batch.tolist(), m.samples, m.step_samples) for m in cuts] == [
        ([0, 1], 2, 5), ([2, 3, 4], 3, 5), ([5], 1, 2), ([6], 1, 2),
    ]  # fmt: skip
