from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from paceline.data.adopt import look_at
from paceline.data.loader import DataShard
from paceline.data.shard_claims import declared, is_sharded
from paceline.errors import DataError
from reading import Stream

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
        look_at(DataLoader(SplitByNode(1, 2).batched(), batch_size=None), 0),
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
