"""Turns the user's data (a Dataset, a DataLoader or an iterable) into a `Loader`. A table of what becomes of each is in
docs/guides/data.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.data.epoch_reader import generators_in, length_of
from paceline.data.iterable import (
    BatchStream,
    ReadyBatches,
    SampleStream,
    UserBatches,
    beginnings,
    declared_batch,
    loader_in,
)
from paceline.data.loader import DataShard, IndexedLoader, Loader, ReadOptions
from paceline.data.same_reading import warn_unless_repeatable
from paceline.data.sample_order import BatchSamplerOrder, FormulaOrder, SamplerOrder
from paceline.data.sharded_stream import BatchShares, SampleShares, ShardedStream, is_sharded, wrong_shard
from paceline.errors import DataError
from paceline.plan.slicing import slice_bounds
from paceline.runtime import collectives

_ITERATION = ("__iter__", "_get_iterator", "_index_sampler")  # of a DataLoader
_RESUMES = "a resumed run skips what it has read, which is exact on the same number of ranks if the stream is the same"


@dataclass(frozen=True)
class LoaderSpec:
    """How a run reads its data."""

    batch: int
    part: DataShard
    seed: int
    shuffle: bool
    workers: int
    pin_memory: bool
    sharded: bool | None = None  # what the user says about streams: each rank reads its own shard, or all of it
    compare: bool = False  # samples of a dataset between ranks
    training: bool = True  # an error if there are fewer samples than a batch; an evaluation accepts any number
    announce: bool = False  # epochs, to `set_epoch` of a dataset
    whole: bool = False  # whether a rank collates whole batches, and keeps its slice
    collate: Callable[[list[Any]], Any] | None = None  # for datasets without a DataLoader


def sets_in(data: Any, seed: int) -> dict[str, Any]:
    """Validation sets by the prefix of what they record, as `recognize` returns them. A single one has none."""
    if _has_names(data):
        return {f"{name}/": recognize(each, seed) for name, each in data.items()}
    return {} if data is None else {"": recognize(data, seed)}


def _has_names(data: Any) -> bool:
    return isinstance(data, Mapping) and bool(data) and all(isinstance(name, str) for name in data)


def recognize(data: Any, seed: int) -> Any:
    """Return `data`; iterables of batches are wrapped so that the batch size is known before training."""
    if loader_in(data) not in (None, data):
        return ReadyBatches(data, seed)
    if isinstance(data, DataLoader):
        itself = data.batch_size is None and data.batch_sampler is None
        itself = itself or (iterates_itself(data) and not _is_distributed(data))
        return ReadyBatches(data, seed) if itself else data
    if not (isinstance(data, (str, bytes, type)) or _are_columns(data) or _has_names(data)):
        if isinstance(data, (IterableDataset, ReadyBatches)) or _has_indices(data):
            return data
        if hasattr(data, "__iter__"):
            return ReadyBatches(data, seed)
    given = f"the class {data.__name__}" if isinstance(data, type) else f"{type(data).__name__} {data!r:.60}"
    fix = "pass one of these to train()"
    if isinstance(data, type):
        fix = f"create it: {data.__name__}(…)"
    elif _has_names(data):
        given = f"a dict of {', '.join(map(repr, data))}"
        fix = f"pass one of them, such as data[{next(iter(data))!r}]; only train(…, val) and evaluate() take several"
    elif _are_columns(data):
        given, fix = f"a {type(data).__name__} of {len(data)} tensors", "pass TensorDataset(inputs, targets)"
    elif isinstance(data, (str, bytes)):
        fix = "read the file in a Dataset, or name a dataset in a recipe"
    elif hasattr(data, "__getitem__"):
        given, fix = f"{type(data).__name__} without __len__", "define __len__, or derive from IterableDataset"
    what = f"Unsupported data: expected a Dataset, a DataLoader or an iterable of batches, got {given}."
    raise DataError("not-data", what, fix=fix)


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Whether a subclass of torch's DataLoader has an iteration of its own (mixup, prefetching, neighbor sampling)."""
    if getattr(loader, "next_iter_state", None) is not None:  # of torchdata, where it was told to continue
        return True
    kinds = [next(each for each in type(loader).__mro__ if name in vars(each)) for name in _ITERATION]
    own = any(kind.__module__.partition(".")[0] not in ("torch", "torchdata") for kind in kinds)
    return own or not vars(loader).keys().isdisjoint(_ITERATION)


def _are_columns(data: Any) -> bool:
    """Whether this is (inputs, targets) for all samples. In a sequence of batches, dtypes and dims are equal."""
    if not isinstance(data, tuple) or not all(isinstance(each, Tensor) and each.dim() for each in data):
        return False
    return len({len(each) for each in data}) == 1 < len({(each.dtype, each.dim()) for each in data})


def _has_indices(data: Any) -> bool:
    """Whether this is a map-style dataset, of torch or of another library. A list or tuple contains batches."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, tuple))


def batch_of(data: Any, part: DataShard, sharded: bool | None = None) -> tuple[int | None, bool]:
    """The batch size that the data implies, None if the run has to set it; and whether it is that of one rank."""
    if isinstance(data, ReadyBatches):
        return data.batch, bool(is_sharded(data, sharded, part))
    if not isinstance(data, DataLoader):
        return None, False
    size = declared_batch(data)
    if isinstance(data.dataset, IterableDataset):
        return size, bool(is_sharded(data, sharded, part))
    return size, _is_distributed(data)


def has_default_batch(data: Any) -> bool:
    """Whether a DataLoader has the batch size of one without `batch_size`, so that the run may set another."""
    return isinstance(data, DataLoader) and data.batch_size == 1 and not _is_distributed(data)


def global_batch(data: Any, part: DataShard, sharded: bool | None, *, counts: bool) -> int | None:
    """The global batch that the data implies: the sum over data ranks if each of them reads its own batches.

    Collective. `counts`: whether this rank stands for its data rank.
    """
    size, own = batch_of(data, part, sharded)
    gathered = collectives.all_gather_object([size, own, counts])
    if len({each[1] for each in gathered}) > 1:
        raise wrong_shard("only some ranks read a shard of their own")
    return sum(each[0] for each in gathered if each[2]) if own and size else size


def claim(data: Any, data_rank: int) -> dict[str, int] | None:
    """What a DistributedSampler assumes about the world, to be compared across ranks."""
    if not isinstance(data, DataLoader) or not _is_distributed(data):
        return None
    sampler = _sampler(data)
    return {"replicas": sampler.num_replicas, "rank": sampler.rank, "batches": len(data), "data_rank": data_rank}


def require_true_claims(claims: Sequence[dict[str, int] | None], data_ranks: int) -> None:
    """Raise unless the samplers of all ranks, in rank order, partition the data."""
    if None in claims and any(claims):
        raise _wrong_sampler("only some ranks use a DistributedSampler")
    for rank, own in enumerate(claims):
        if own is None:
            continue
        if own["replicas"] != data_ranks or own["rank"] != own["data_rank"]:
            raise _wrong_sampler(
                f"on rank {rank} it was built for rank {own['rank']} of {own['replicas']}, but this is data rank "
                f"{own['data_rank']} of {data_ranks}"
            )
        if claims[0] is not None and own["batches"] != claims[0]["batches"]:
            raise _wrong_sampler(f"rank 0 has {claims[0]['batches']} batches per epoch, rank {rank}: {own['batches']}")


def _wrong_sampler(what: str) -> DataError:
    return DataError("wrong-sampler", f"The DistributedSampler does not match this world: {what}.")


def adopt(data: Any, spec: LoaderSpec, say: Callable[[str], None]) -> Loader:
    """The loader for `data`; `say` receives a line for every choice that the user should know."""
    if isinstance(data, ReadyBatches):
        if spec.training and spec.compare:
            warn_unless_repeatable(data.source, data.beginnings())
        sharded = is_sharded(data, spec.sharded, spec.part)
        if sharded:
            say(f"data: the batches of each rank; the global batch is their sum ({spec.batch}); {_RESUMES}")
            return ShardedStream(BatchShares(data.source, spec.part.groups, spec.seed, data.kind), spec.part)
        kind = type(data.source).__name__
        how = f"what {kind} itself yields; every rank reads all of it" if isinstance(data.source, DataLoader) else ""
        say(f"data: {how or 'iterable of global batches'}, sliced by rank")
        return BatchStream(data, spec.batch, spec.part, spec.seed, compare=sharded is None)
    if isinstance(data, DataLoader):
        return _adopt_loader(data, spec, say)
    reading = ReadOptions(
        spec.collate, spec.workers, spec.pin_memory, spec.compare, announce=spec.announce, whole=spec.whole
    )
    if isinstance(data, IterableDataset):  # in a worker, unless a DataLoader says otherwise
        return _stream(data, data, spec, replace(reading, workers=max(1, spec.workers)), say)
    return _indexed(data, spec, reading)


def _stream(
    data: Any, dataset: Any, spec: LoaderSpec, reading: ReadOptions, say: Callable[[str], None], drop_last: bool = False
) -> Loader:
    """The loader of an IterableDataset; `data` is the dataset, or the DataLoader that contains it."""
    if spec.training and spec.compare:
        warn_unless_repeatable(dataset, beginnings(dataset, spec.seed, reading))
    sharded = is_sharded(data, spec.sharded, spec.part)
    if not sharded:
        say("data: iterable dataset; every rank reads all of it and keeps its slice; resume is approximate")
        compare = sharded is None
        return SampleStream(dataset, spec.batch, spec.part, spec.seed, reading, drop_last=drop_last, compare=compare)
    start, stop = slice_bounds(spec.batch, spec.part.ranks, spec.part.rank)
    if spec.batch < spec.part.ranks:
        raise DataError(
            "smaller-than-batch",
            f"The batch of {spec.batch} samples is smaller than the number of data ranks, {spec.part.ranks}.",
            why="each rank reads its own shard of the stream, so every batch needs a sample of each",
            fix=f"set batch to {spec.part.ranks} or more",
        )
    say(f"data: iterable dataset; each rank reads its own shard; {_RESUMES}")
    shares = SampleShares(dataset, stop - start, spec.part.groups, spec.seed, reading, drop_last=drop_last)
    return ShardedStream(shares, spec.part, drop_last=drop_last)


def _indexed(dataset: Any, spec: LoaderSpec, reading: ReadOptions, drop_last: bool = False) -> Loader:
    samples = len(dataset)
    if samples == 0:
        raise DataError("empty", f"The dataset {type(dataset).__name__} is empty.")
    if spec.training and samples < spec.batch:
        raise DataError(
            "smaller-than-batch",
            f"The dataset has {samples} samples, fewer than one batch of {spec.batch}.",
            fix=f"set batch to {samples} or less",
        )
    order = FormulaOrder(samples, spec.batch, spec.seed, shuffle=spec.shuffle, drop_last=drop_last)
    return IndexedLoader(dataset, order, spec.part, spec.seed, reading)


def _adopt_loader(loader: DataLoader[Any], spec: LoaderSpec, say: Callable[[str], None]) -> Loader:
    reading = _reading(loader, spec)
    sampler = _sampler(loader)
    drop_last = spec.training and bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))
    if isinstance(loader.dataset, IterableDataset):
        return _stream(loader, loader.dataset, spec, reading, say, drop_last)
    if getattr(loader, "in_order", True) is False:
        say("data: in_order=False has no effect: a step has the same samples on any number of ranks and workers")
    if _is_distributed(loader) and (spec.training or iterates_itself(loader)):
        ranks, shuffled = sampler.num_replicas, ", shuffle=True" if sampler.shuffle else ""
        say(
            "data: the DistributedSampler of the DataLoader selects the samples of each rank, and repeats some if "
            f"they are uneven; global batch: {ranks} ranks × {spec.batch / ranks:g} = {spec.batch}. It is not needed: "
            f"with DataLoader(…, batch_size={spec.batch}{shuffled}), the Trainer divides each batch among ranks"
        )
        return UserBatches(loader, sampler, spec.batch, spec.part, announce=spec.announce)
    seeded = spec.training and bool(generators_in(sampler))  # by the user, whose generator determines the order
    if _is_distributed(loader) or (_is_plain(loader, sampler) and not seeded):
        shuffle = spec.training and isinstance(sampler, RandomSampler)
        return _indexed(loader.dataset, replace(spec, shuffle=shuffle), reading, drop_last)
    if sampler is None:
        say(f"data: each list of {type(loader.batch_sampler).__name__} is a global batch, sliced by rank")
        batches = BatchSamplerOrder(loader, spec.batch, spec.seed)
        return IndexedLoader(loader.dataset, batches, spec.part, spec.seed, reading)
    say(f"data: using {type(sampler).__name__}; its indices are identical on every rank, then sliced")
    order = SamplerOrder(sampler, spec.batch, spec.seed, loader, drop_last=drop_last)
    return IndexedLoader(loader.dataset, order, spec.part, spec.seed, reading)


def order_of(data: Any, *, shuffle: bool) -> Any:
    """What determines the order of samples: a sampler of the user, or a text."""
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        sampler = _sampler(data)
        if sampler is None or not _is_plain(data, sampler):
            return sampler or data.batch_sampler
        return "shuffled" if isinstance(sampler, RandomSampler) else "in order"
    if isinstance(data, DataLoader) or not _has_indices(data):
        return "that of the stream"
    return "shuffled" if shuffle else "in order"


def _sampler(loader: DataLoader[Any]) -> Any:
    """The sampler; None if a custom batch sampler selects whole batches.

    `loader.sampler` would be wrong: with a batch sampler, torch sets it to an unused sequential sampler.
    """
    batch_sampler = loader.batch_sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else None


def _is_distributed(loader: DataLoader[Any]) -> bool:
    return isinstance(_sampler(loader), DistributedSampler)


def _is_plain(loader: DataLoader[Any], sampler: Any) -> bool:
    """Whether the sampler yields every sample once, in order or shuffled, as our own order does."""
    if length_of(loader.dataset) != length_of(sampler):  # made for other data, such as range(10)
        return False
    if type(sampler) is SequentialSampler:
        return True
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def _reading(loader: DataLoader[Any], spec: LoaderSpec) -> ReadOptions:
    """Keep the collate function and worker settings of the user."""
    options: dict[str, Any] = {"worker_init_fn": loader.worker_init_fn, "timeout": loader.timeout}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    return ReadOptions(
        collate=loader.collate_fn,
        workers=loader.num_workers,
        pin_memory=loader.pin_memory or spec.pin_memory,
        compare=spec.compare,
        announce=spec.announce,
        whole=spec.whole,
        persistent=loader.persistent_workers,
        options=tuple(options.items()),
    )
