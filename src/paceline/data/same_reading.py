"""Compares what ranks read, where all of them must read the same: streams and orders that are sliced, and datasets.

Each rank takes its slice of the same sequence of samples. If the sequences differ, because a stream splits itself or a
sampler is not seeded, some samples are lost and others are read twice. A checksum of the sequence is compared in the
first step, and once in a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet
from zlib import crc32

import torch
from torch.utils.data import DataLoader

from paceline.data.batches import comparable, layout_of, rows_of
from paceline.data.seeded_dataset import SeededBatches, fingerprint, reads_batches
from paceline.errors import DataError
from paceline.log import rank_log
from paceline.runtime import collectives
from paceline.text import by_rank

_EVERY = 32  # steps between two comparisons: a gather of one number costs as much as a small kernel

_datasets: WeakSet[Any] = WeakSet()  # compared already


class SameReading:
    """A checksum of the steps that this rank has read so far."""

    def __init__(self, different: Callable[[int, list[str]], DataError]) -> None:
        self._different, self._content, self._steps = different, 0, 0

    def add(self, step: int, epoch: int, content: int) -> None:
        """Add a step. Collective in the first step and every now and then, on several ranks."""
        self._content = crc32(f"{epoch} {content}".encode(), self._content)
        self._steps += 1
        if self._steps % _EVERY == 1:
            gathered = [f"checksum {value:08x}" for value in collectives.all_gather_object(self._content)]
            if len(set(gathered)) > 1:
                raise self._different(step, gathered)


def watch_stream() -> SameReading | None:
    return SameReading(different_streams) if collectives.world() > 1 else None


def watch_order() -> SameReading | None:
    return SameReading(_different_orders) if collectives.world() > 1 else None


def different_streams(step: int, gathered: list[str]) -> DataError:
    return DataError(
        "different-data",
        f"Ranks read different samples from this stream, at the latest in step {step + 1}:\n" + by_rank(gathered),
        why="each rank keeps its slice of one stream; if a stream splits itself by rank, samples are lost",
        fix="if each rank reads its own shard, set data.sharded: true (Trainer(…, data={'sharded': True}), or `sharded "
        "= True` in the dataset); otherwise make the stream the same on every rank (sort files, seed generators); "
        "data.sharded: false disables this check",
    )


def _different_orders(step: int, gathered: list[str]) -> DataError:
    return DataError(
        "different-order",
        f"The sampler yields different indices on each rank, at the latest in step {step + 1}:\n" + by_rank(gathered),
        why="each rank keeps its slice of one order; with different orders samples are lost, and others are read twice",
        fix="seed the generator of the sampler identically on every rank, e.g. numpy.random.default_rng(0), or use the "
        "global generators, which are seeded by (seed, epoch)",
    )


def content_of(indices: Sequence[Any]) -> int:
    """A checksum of indices, the same in every process."""
    if all(type(index) is int for index in indices):
        return hash(tuple(indices))
    return crc32(repr(list(indices)).encode())


def require_same_samples(dataset: Any, seed: int, epoch: int, indices: Sequence[Any], workers: int) -> None:
    """Read three samples on every rank and compare them; once for each dataset. Collective.

    The first is read twice: a dataset that returns something else each time is named. One that reads batches must
    return the same samples one by one.
    """
    try:
        known = dataset in _datasets
        _datasets.add(dataset)
    except TypeError:  # not hashable
        known = False
    if known:
        return
    chosen = [indices[0], indices[0], indices[len(indices) // 2], indices[-1]]
    # In a worker if there are any: a file that is opened here could not be used in workers started later.
    several = [(epoch, chosen[1:])] if reads_batches(dataset) else []
    steps: Any = [*((epoch, [index]) for index in chosen), *several]
    reader: DataLoader[list[int]] = DataLoader(
        SeededBatches(dataset, seed, _checksums, own_collate=False),  # of which the first batch is seeded
        batch_sampler=steps,
        num_workers=min(1, workers),
        collate_fn=list,
        generator=torch.Generator(),
    )
    problem, facts = "", list[str]()
    try:
        [first], again, *others = [[f"{value:08x}" for value in values] for values in reader]
        facts = [first, *(value for [value] in others[:2])] if again == [first] else []
        problem = "" if facts else "unrepeatable"
        if facts and several and others[2] != facts:
            problem = "coupled-samples"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    gathered, kinds, found = zip(
        *collectives.all_gather_object([facts, repr(fingerprint(dataset)), problem]), strict=True
    )
    if any(found):
        problem = next(filter(None, found))
        rank_log(collectives.rank()).warning(str(_doubt(problem, dataset, chosen)))
    same_kind = len(set(kinds)) == 1  # otherwise the pre-flight reports more than that
    if same_kind and all(gathered) and any(each != gathered[0] for each in gathered):
        raise DataError(
            "different-data",
            f"Samples {', '.join(map(str, chosen[1:]))} of {type(dataset).__name__} differ between ranks:\n"
            + by_rank([f"checksums {' '.join(each)}" for each in gathered]),
            why="each rank selects its samples of one dataset by index; with different datasets some samples are lost "
            "and others are read twice",
            fix="build the same dataset on every rank: sort file lists (os.listdir has no fixed order), seed random "
            "splits, and do not split it by rank; preflight=False disables this check",
        )


def _doubt(problem: str, dataset: Any, chosen: list[Any]) -> DataError:
    """Why samples may depend on the number of ranks and workers."""
    kind = type(dataset).__name__
    if problem == "unrepeatable":
        return DataError(
            "unrepeatable",
            f"Reading sample {chosen[0]} of {kind} twice, with the same random numbers, returned different samples.",
            why="every rank and worker has its own copy of the dataset: samples depend on their number, may be equal "
            "on all ranks, and differ in a resumed run",
            fix="compute a sample from its index; draw from the global generators, which are seeded by (seed, epoch, "
            "index), or from numpy.random.default_rng((seed, index)); if samples follow one another, use an "
            "IterableDataset",
        )
    if problem == "coupled-samples":
        return DataError(
            "coupled-samples",
            f"{kind}.__getitems__ returns other samples for {chosen[1:]} than for each of them alone.",
            why="every rank reads its slice of a micro-batch, so results depend on ranks and on accumulate",
            fix="compute a sample from its own index; mix or normalize a batch in the loss or in the model",
        )
    return DataError(
        "not-compared",
        f"Samples {chosen[1:]} of {kind} could not be compared between ranks ({problem}).",
        why="if ranks have different datasets, some samples are lost and others are read twice",
        fix="read these samples once before training; preflight=False disables this check",
    )


def _checksums(samples: Any) -> list[int]:
    if not isinstance(samples, list) and (known := layout_of(samples)) is not None:  # collated by `__getitems__`
        samples = [rows_of(samples, row, row + 1) for row in range(known[0])]
    return [comparable(sample) for sample in samples]
