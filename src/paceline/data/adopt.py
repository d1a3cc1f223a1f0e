"""What the user's data becomes: a Dataset, or a DataLoader they already have, as a loader in our order.

| given                                  | what happens                                                          |
|----------------------------------------|-----------------------------------------------------------------------|
| a map-style Dataset                    | the order formula                                                     |
| a DataLoader, plain sampler            | rebuilt from its dataset, collate function and workers; batch = global |
| a DataLoader, DistributedSampler       | each rank's batches as they come; the global batch is their sum       |
| a DataLoader, another (batch) sampler  | its indices, drawn alike on every rank, then cut                      |
| a DataLoader without batching          | ready global batches, cut by rank                                     |
| anything else that iterates            | the same                                                              |
| an IterableDataset                     | read by every rank, cut by arithmetic                                 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.data.iterable import BatchStream, OwnBatches, ReadyBatches, SampleStream
from paceline.data.loader import DataShard, IndexedLoader, Loader, ReadOptions
from paceline.data.sample_order import BatchSamplerOrder, FormulaOrder, SamplerOrder
from paceline.errors import DataError


@dataclass(frozen=True)
class LoaderSpec:
    """What the run asks of its data."""

    batch: int
    part: DataShard
    seed: int
    shuffle: bool
    workers: int
    pin_memory: bool
    training: bool = True  # fewer samples than a batch are then an error; an evaluation takes what there is


def look_at(data: Any, seed: int) -> Any:
    """The data itself; ready batches wrapped, so that the size of the first is known before training begins."""
    if isinstance(data, DataLoader):
        return ReadyBatches(data, seed) if data.batch_size is None and data.batch_sampler is None else data
    if isinstance(data, (IterableDataset, ReadyBatches)) or _has_indices(data):
        return data
    if hasattr(data, "__iter__"):
        return ReadyBatches(data, seed)
    raise DataError(
        "not-data",
        f"A {type(data).__name__} can't be trained on.",
        fix="give a Dataset, a DataLoader, or an iterable of batches",
    )


def _has_indices(data: Any) -> bool:
    """A list that somebody holds in memory is of batches; datasets of other libraries need not be torch's class."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, tuple))


def batch_of(data: Any, ranks: int) -> int | None:
    """The global batch that the data itself asks for; None where the run has to say it."""
    if isinstance(data, ReadyBatches):
        return data.batch
    if not isinstance(data, DataLoader):
        return None
    size = data.batch_size or getattr(data.batch_sampler, "batch_size", None)
    return size * ranks if size and _is_distributed(data) else size


def claim(data: Any, data_rank: int) -> dict[str, int] | None:
    """What a DistributedSampler takes for granted about the world, to be compared between the ranks."""
    if not isinstance(data, DataLoader) or not _is_distributed(data):
        return None
    sampler = _sampler(data)
    return {"replicas": sampler.num_replicas, "rank": sampler.rank, "batches": len(data), "data_rank": data_rank}


def require_true_claims(claims: Sequence[dict[str, int] | None], data_ranks: int) -> None:
    """Each rank's claim, in the order of ranks: samplers that do not share out the data between them are an error."""
    if None in claims and any(claims):
        raise _wrong_sampler("some ranks have a DistributedSampler and some have not")
    for rank, own in enumerate(claims):
        if own is None:
            continue
        if own["replicas"] != data_ranks or own["rank"] != own["data_rank"]:
            raise _wrong_sampler(
                f"rank {rank}'s is for rank {own['rank']} of {own['replicas']}, but it is data rank "
                f"{own['data_rank']} of {data_ranks}"
            )
        if claims[0] is not None and own["batches"] != claims[0]["batches"]:
            raise _wrong_sampler(f"rank 0 has {claims[0]['batches']} batches an epoch, rank {rank} {own['batches']}")


def _wrong_sampler(what: str) -> DataError:
    return DataError(
        "wrong-sampler",
        f"The DistributedSampler does not fit this world: {what}.",
        why="ranks would train on each other's samples, or wait for batches that never come",
        fix="give the dataset, or a DataLoader without DistributedSampler: the Trainer shares it out exactly",
    )


def adopt(data: Any, spec: LoaderSpec, say: Callable[[str], None]) -> Loader:
    """The loader for `data`; `say` gets a line where the choice is one that the user should know."""
    if isinstance(data, ReadyBatches):
        say("data: taken as ready global batches, cut by rank")
        return BatchStream(data, spec.batch, spec.part, spec.seed)
    if isinstance(data, DataLoader):
        return _adopt_loader(data, spec, say)
    reading = ReadOptions(workers=spec.workers, pin_memory=spec.pin_memory)
    if isinstance(data, IterableDataset):
        return _stream(data, spec, reading, say)
    return _indexed(data, spec, reading)


def _stream(
    dataset: Any, spec: LoaderSpec, reading: ReadOptions, say: Callable[[str], None], drop_last: bool = False
) -> Loader:
    say("data: an iterable dataset; every rank reads it whole and keeps its part; resume is approximate")
    return SampleStream(dataset, spec.batch, spec.part, spec.seed, reading, drop_last=drop_last)


def _indexed(dataset: Any, spec: LoaderSpec, reading: ReadOptions, drop_last: bool = False) -> Loader:
    samples = len(dataset)
    if samples == 0:
        raise DataError("empty", f"The dataset {type(dataset).__name__} holds no samples.")
    if spec.training and samples < spec.batch:
        raise DataError(
            "smaller-than-batch",
            f"The dataset holds {samples} samples, fewer than one batch of {spec.batch}.",
            fix=f"set batch to {samples} or less",
        )
    order = FormulaOrder(samples, spec.batch, spec.seed, shuffle=spec.shuffle, drop_last=drop_last)
    return IndexedLoader(dataset, order, spec.part, spec.seed, reading)


def _adopt_loader(loader: DataLoader[Any], spec: LoaderSpec, say: Callable[[str], None]) -> Loader:
    reading = _reading(loader, spec)
    sampler, drop_last = _sampler(loader), _drops_last(loader) and spec.training
    if isinstance(loader.dataset, IterableDataset):
        return _stream(loader.dataset, spec, reading, say, drop_last)
    if _is_distributed(loader) and spec.training:
        say(
            "data: the DataLoader's DistributedSampler picks each rank's samples; the global batch is their sum "
            f"({spec.batch}), and where it repeats samples to even out the ranks, so does training"
        )
        return OwnBatches(loader, sampler, spec.batch, spec.part)
    if _is_distributed(loader) or _is_plain(sampler):
        shuffle = spec.training and isinstance(sampler, RandomSampler)
        return _indexed(loader.dataset, replace(spec, shuffle=shuffle), reading, drop_last)
    if sampler is None:
        say(f"data: each list of {type(loader.batch_sampler).__name__} is one global batch, cut by rank")
        assert loader.batch_sampler is not None
        batches = BatchSamplerOrder(loader.batch_sampler, spec.batch, spec.seed)
        return IndexedLoader(loader.dataset, batches, spec.part, spec.seed, reading)
    say(f"data: {type(sampler).__name__} is honoured: its indices are drawn alike on every rank, then cut")
    order = SamplerOrder(sampler, spec.batch, spec.seed, drop_last=drop_last)
    return IndexedLoader(loader.dataset, order, spec.part, spec.seed, reading)


def _sampler(loader: DataLoader[Any]) -> Any:
    """What picks the samples; None where a batch sampler of the user's own picks whole batches.

    `loader.sampler` would be wrong: given a batch sampler, torch puts a sequential one there that nobody uses.
    """
    batch_sampler = loader.batch_sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else None


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))


def _is_distributed(loader: DataLoader[Any]) -> bool:
    return isinstance(_sampler(loader), DistributedSampler)


def _is_plain(sampler: Any) -> bool:
    """Samplers whose meaning our order keeps: every sample once, in order or shuffled."""
    if type(sampler) is SequentialSampler:
        return True
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def _reading(loader: DataLoader[Any], spec: LoaderSpec) -> ReadOptions:
    """The user's collate function and worker settings, kept."""
    options: dict[str, Any] = {"worker_init_fn": loader.worker_init_fn, "timeout": loader.timeout}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    return ReadOptions(
        collate=loader.collate_fn,
        workers=loader.num_workers,
        pin_memory=loader.pin_memory or spec.pin_memory,
        options=tuple(options.items()),
    )
