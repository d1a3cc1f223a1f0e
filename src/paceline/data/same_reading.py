"""Compares what ranks read, where all of them must read the same: streams and orders that are sliced, and datasets.

Each rank takes its slice of the same sequence of samples. If the sequences differ, because a stream splits itself or a
sampler is not seeded, some samples are lost and others are read twice. A checksum of the sequence is compared in the
first step, and once in a while. A collate function is tried on some samples, in one list and in two halves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet
from zlib import crc32

import torch
from torch.utils.data import DataLoader

from paceline.data.batches import comparable, layout_of, rows_of, tensors_in
from paceline.data.seeded_dataset import SeededBatches, fingerprint, reads_batches
from paceline.errors import DataError
from paceline.log import rank_log
from paceline.run.user_frame import place_of
from paceline.runtime import collectives
from paceline.runtime.generator_states import RandomStream, same_states, save_states
from paceline.text import by_rank

_EVERY = 32  # steps between two comparisons: a gather of one number costs as much as a small kernel
_SAMPLES = 8  # that a collate function is tried on
Collate = Callable[[list[Any]], Any]

_compared: WeakSet[Any] = WeakSet()  # datasets
_tried: WeakSet[Any] = WeakSet()  # those whose collate function was


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
    )


def warn_unless_repeatable(stream: Any, beginnings: Iterable[Any]) -> None:
    """Warn, once for a stream, if passes over it, with the same random numbers, begin with different samples. Every
    rank reads them: a loader may count its passes."""
    if not _is_known(stream, _compared) and len(set(beginnings)) > 1 and collectives.rank() == 0:
        what = f"Two passes over {type(stream).__name__}, with the same random numbers, begin with different samples."
        why = "runs with the same seed differ, and a resumed one repeats some samples of its epoch, and skips others"
        fix = "pass a seed, or draw from the global generators, which are seeded by (seed, epoch): in webdataset, "
        fix += ".shuffle(1000, rng=random) with the module random"
        rank_log(0).warning(str(DataError("unrepeatable", what, why=why, fix=fix)))


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
    if _is_known(dataset, _compared):
        return
    chosen = [indices[0], indices[0], indices[len(indices) // 2], indices[-1]]
    several = [chosen[1:]] if reads_batches(dataset) else []
    batches = SeededBatches(dataset, seed, _checksums, own_collate=False)  # of which the first batch is seeded
    reader = read_again(batches, epoch, [*([index] for index in chosen), *several], workers)
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


def read_again(batches: SeededBatches, epoch: int, parts: list[Sequence[Any]], workers: int) -> DataLoader[Any]:
    """What `batches` makes of lists of indices. In a worker if there are any: a file that is opened here could not be
    used in workers started later."""
    steps: Any = [(epoch, part, None) for part in parts]
    options: dict[str, Any] = {"num_workers": min(1, workers), "collate_fn": list, "generator": torch.Generator()}
    return DataLoader(batches, batch_sampler=steps, **options)


def _doubt(problem: str, dataset: Any, chosen: list[Any]) -> DataError:
    """Why samples may depend on the number of ranks and workers."""
    kind = type(dataset).__name__
    if problem == "unrepeatable":
        return DataError(
            "unrepeatable",
            f"Reading sample {chosen[0]} of {kind} twice, with the same random numbers, returned different samples.",
        )
    if problem == "coupled-samples":
        return DataError(
            "coupled-samples",
            f"{kind}.__getitems__ returns other samples for {chosen[1:]} than for each of them alone.",
        )
    return DataError("not-compared", f"Samples {chosen[1:]} of {kind} could not be compared between ranks ({problem}).")


def _checksums(samples: Any) -> list[int]:
    if not isinstance(samples, list) and (known := layout_of(samples)) is not None:  # collated by `__getitems__`
        samples = [rows_of(samples, row, row + 1) for row in range(known[0])]
    return [comparable(sample) for sample in samples]


def _is_known(dataset: Any, known: WeakSet[Any]) -> bool:
    """Whether `known` has the dataset, which is added."""
    try:
        found = dataset in known
        known.add(dataset)
    except TypeError:  # not hashable
        return False
    return found


def _problem(collate: Collate, samples: list[Any]) -> list[str]:
    """Collates samples, and returns what is wrong with the function, if anything. Generators are left as they were."""
    try:
        whole, drew = _collated(collate, samples)
        if drew:
            return ["draws random numbers for a batch"]
        if not _equal(whole, _collated(collate, samples)[0]):
            return ["returns another batch each time, for the same samples"]
        middle = len(samples) // 2
        halves = [_collated(collate, half)[0] for half in (samples[:middle], samples[middle:])]
        return [] if _adds_up(whole, halves, len(samples)) else ["returns another batch than for its halves"]
    except Exception as error:
        return [f"could not be tried on {len(samples)} samples and on half of them ({type(error).__name__}: {error})"]


def _collated(collate: Collate, samples: list[Any]) -> tuple[Any, bool]:
    """A batch, and whether random numbers were drawn for it."""
    with RandomStream(0):
        before = save_states()
        # Copies: a collate function may have a generator of its own, and change samples in place.
        batch = copy.deepcopy(collate)(copy.deepcopy(samples))
        return batch, not same_states(before, save_states())


def try_collate(dataset: Any, collate: Collate, seed: int, first: tuple[int, Sequence[Any]], workers: int) -> None:
    """Warn, once for a dataset, if the function mixes samples or draws random numbers for a batch: then slices of it
    depend on the layout. `first`: the epoch and the indices of the first step."""
    epoch, indices = first
    if _is_known(dataset, _tried) or len(indices) < 2:
        return
    batches = SeededBatches(dataset, seed, partial(_problem, collate), own_collate=True)
    [problems] = read_again(batches, epoch, [indices[:_SAMPLES]], workers)
    for problem in problems:
        rank_log(0).warning(str(_doubt_of_collate(collate, problem)))


def _doubt_of_collate(collate: Collate, problem: str) -> DataError:
    name = getattr(collate, "__name__", None) or type(collate).__name__
    return DataError("collated-slices", f"The collate function {name}{place_of(collate)} {problem}.")


def _adds_up(whole: Any, halves: list[Any], samples: int) -> bool:
    """Whether the rows of a batch are those of its halves. It may be sorted. Not judged if shapes differ otherwise, as
    those of padded sequences do, or if the first dim is not the samples."""
    known = layout_of(whole)
    if known is None or known[0] != samples:
        return True
    lengths = [layout_of(half) for half in halves]
    if [each[1] for each in lengths if each] != [known[1]] * 2 or sum(each[0] for each in lengths if each) != samples:
        return True
    counts = [each[0] for each in lengths if each]
    rows = [rows_of(whole, row, row + 1) for row in range(samples)]
    others = [rows_of(half, row, row + 1) for half, count in zip(halves, counts, strict=True) for row in range(count)]
    if [_shapes(row) for row in rows] != [_shapes(row) for row in others]:
        return sorted(map(_shapes, rows)) != sorted(map(_shapes, others)) or _same_sets(rows, others)
    return all(map(_equal, rows, others)) or _same_sets(rows, others)


def _same_sets(rows: list[Any], others: list[Any]) -> bool:
    return sorted(map(comparable, rows)) == sorted(map(comparable, others))


def _shapes(row: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in _batched(row)]


def _batched(batch: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(batch) if tensor.dim()]  # others are facts of a batch, such as its length


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(_batched(one), _batched(other), strict=True)
    return all(a.shape == b.shape and torch.allclose(_numbers(a), _numbers(b), equal_nan=True) for a, b in pairs)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)
