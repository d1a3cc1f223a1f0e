from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from paceline.data.adopt import recognize
from paceline.data.loader import DataShard
from paceline.data.sharded_stream import declared, is_sharded
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


SECOND = DataShard(1, 2)


class SplitByNode(Stream):
    """As datasets.IterableDataset after split_dataset_by_node."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(8)
        self._distributed = SimpleNamespace(rank=rank, world_size=world_size)

    def batched(self) -> Tokenized:
        return Tokenized([torch.arange(4)], self)


class Tokenized(IterableDataset[Any]):
    def __init__(self, source: Any, *others: Any) -> None:
        self.source_of_text, self.first = source, next(iter(others), None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source_of_text)


class Pipeline(Stream):
    """As webdataset.DataPipeline."""

    def __init__(self, *stages: Any) -> None:
        super().__init__(8)
        self.pipeline = list(stages)


def split_by_node(source: Any) -> Any:
    return source


@pytest.mark.parametrize(
    "data",
    [
        SplitByNode(1, 2),
        Tokenized(SplitByNode(1, 2)),
        DataLoader(SplitByNode(1, 2), batch_size=4),
        recognize(DataLoader(SplitByNode(1, 2).batched(), batch_size=None), 0),
    ],
)
def test_a_stream_that_was_split_for_this_rank_is_sharded(data: Any) -> None:
    assert is_sharded(data, None, SECOND) is True


def test_stages_of_a_pipeline_are_recognized_by_name() -> None:
    found = declared(Pipeline(Stream(8), split_by_node))
    assert found is not None and (found.by, found.ranks) == ("webdataset.split_by_node", 1)
    assert declared(Pipeline(Stream(8), iter)) is None
    resampled = type("ResampledShards", (Stream,), {})
    assert is_sharded(Pipeline(resampled(8)), None, SECOND) is True


def test_a_sharding_filter_takes_effect_in_a_dataloader() -> None:
    pipe = IterableWrapper(range(8)).sharding_filter().map(str)
    assert declared(pipe) is None
    assert declared(DataLoader(pipe, batch_size=None)) is not None
    assert declared(DataLoader(pipe, batch_size=4)) is None  # we read the stream, not the loader
    split = IterableWrapper(range(8)).sharding_filter()
    split.apply_sharding(2, 1)
    assert is_sharded(split, None, SECOND) is True


def test_what_a_stream_says_about_itself_precedes_the_setting() -> None:
    own = type("Own", (Stream,), {"sharded": True})
    assert is_sharded(own(8), False, SECOND) is True
    assert is_sharded(DataLoader(own(8), batch_size=2), None, SECOND) is True
    assert [is_sharded(Stream(8), setting, SECOND) for setting in (None, True, False)] == [None, True, False]
    assert is_sharded(SplitByNode(0, 1), None, SECOND) is None  # split for one rank is not split


@pytest.mark.parametrize(
    ("data", "setting"), [(SplitByNode(0, 2), None), (SplitByNode(1, 3), None), (SplitByNode(1, 2), False)]
)
def test_a_split_for_another_rank_is_an_error(data: Any, setting: bool | None) -> None:
    with pytest.raises(DataError) as caught:
        is_sharded(data, setting, SECOND)
    assert caught.value.code == "data.wrong-shard"
