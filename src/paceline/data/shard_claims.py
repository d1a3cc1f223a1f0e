"""Whether ranks read different data: what streams and samplers declare about it.

A stream declares that it is split across ranks by the attribute `sharded = True`, or because a library split it:

    datasets.distributed.split_dataset_by_node(stream, rank, world_size)
    webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node)
    datapipe.sharding_filter()                                                 in a DataLoader
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.data.loader import DataShard
from paceline.errors import DataError
from paceline.runtime import collectives

_DEPTH = 3  # of streams inside streams


@dataclass(frozen=True)
class Declared:
    """A declaration found in a stream. `rank` is None if any rank may read it."""

    by: str
    rank: int | None = None
    ranks: int | None = None


def is_sharded(data: Any, setting: bool | None, part: DataShard) -> bool | None:
    """Whether each rank reads its own shard of a stream; None if nothing is known. `setting` is `data.sharded`."""
    own = _said_by(data)
    found = declared(data)
    if found is None or found.ranks == 1:
        return setting if own is None else own
    said = own if own is not None else setting
    if said is False:
        raise wrong_shard(f"it is split across ranks by {found.by}, but `sharded` is false")
    if found.rank is not None and (found.rank, found.ranks) != (part.rank, part.ranks):
        expected = f"data rank {part.rank} of {part.ranks}"
        raise wrong_shard(f"{found.by} split it for rank {found.rank} of {found.ranks}, but this is {expected}")
    return True


def wrong_shard(what: str) -> DataError:
    return DataError(
        "wrong-shard",
        f"The shard of this stream does not match the layout: {what}.",
        why="samples would be lost or read several times; ranks along a tensor or pipeline axis read the same samples",
        fix="split it by data rank, or pass the stream without splitting it: every rank then reads all of it and keeps "
        "its slice",
    )


def _said_by(data: Any) -> bool | None:
    for stream in (data, getattr(data, "source", None), *_inside(data)):
        said = getattr(stream, "sharded", None)
        if isinstance(said, bool):
            return said
    return None


def _inside(data: Any) -> Iterator[Any]:
    """The dataset of a DataLoader, also behind an iterable of batches."""
    for loader in (data, getattr(data, "source", None)):
        if isinstance(loader, DataLoader):
            yield loader.dataset


def declared(data: Any, depth: int = _DEPTH) -> Declared | None:
    """The declaration of a stream, or of a stream inside it. No library is imported for it."""
    split: Any = getattr(data, "_distributed", None)  # of the library `datasets`
    if hasattr(split, "rank") and hasattr(split, "world_size"):
        return Declared("split_dataset_by_node", split.rank, split.world_size)
    if type(data).__name__ == "ShardingFilterIterDataPipe" and data.num_of_instances > 1:
        return Declared("apply_sharding", data.instance_id, data.num_of_instances)
    if type(data).__name__ == "ResampledShards":
        return Declared("webdataset.ResampledShards")
    # With a batch size, the stream is read without its DataLoader.
    if isinstance(data, DataLoader) and data.batch_size is None and _has_sharding_filter(data.dataset):
        return Declared("sharding_filter", collectives.rank(), collectives.world())
    stages = getattr(data, "pipeline", None)
    stages = list(stages) if isinstance(stages, (list, tuple)) else []
    names = {getattr(getattr(stage, "func", stage), "__name__", "") for stage in stages}
    if "split_by_node" in names:
        return Declared("webdataset.split_by_node", collectives.rank(), collectives.world())
    inner = [*stages, *getattr(data, "__dict__", {}).values()] if depth else []
    streams = (value for value in inner if isinstance(value, (IterableDataset, DataLoader)) or _looks_split(value))
    return next((found for stream in streams if (found := declared(stream, depth - 1)) is not None), None)


def _looks_split(value: Any) -> bool:
    return getattr(value, "_distributed", None) is not None or type(value).__name__ == "ResampledShards"


def _has_sharding_filter(dataset: Any, depth: int = 32) -> bool:
    """torch's DataLoader makes such a filter keep the shard of this rank and worker."""
    while dataset is not None and depth:
        if type(dataset).__name__ == "ShardingFilterIterDataPipe":
            return True
        inner = (getattr(dataset, name, None) for name in ("source_datapipe", "datapipe", "_datapipe"))
        dataset, depth = next((pipe for pipe in inner if pipe is not None), None), depth - 1
    return False
