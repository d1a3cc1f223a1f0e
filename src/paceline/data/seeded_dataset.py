"""Seeds random numbers per sample instead of per worker.

`__getitem__` and augmentation run under generators seeded by (seed, epoch, index): a sample is the same on any rank and
worker, and differs between epochs. A custom collate function is seeded by its batch.

Seeding takes 15 µs per sample, and most datasets draw nothing. The first batch is seeded and watched. If nothing was
drawn, the next ones are read without seeds, until a generator has moved: that batch is read again, and from there on
all of them are seeded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal
from zlib import crc32

from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from paceline.data.batches import digest, rows_of
from paceline.data.epoch_reader import announce_epoch, length_of
from paceline.errors import DataError
from paceline.run.user_frame import place_of
from paceline.runtime.generator_states import GeneratorStates, RandomStream, exchange_states, same_states, save_states
from paceline.runtime.rng import derive_seed, seed_cpu

Part = tuple[int, Sequence[Any], tuple[int, int] | None]  # epoch, indices, and the rows to keep; None: all
Collate = Callable[[list[Any]], Any]

_ROWS = 16  # of a tensor, enough to distinguish two datasets


class SeededBatches(Dataset[Any]):
    """The batches of a dataset by epoch and indices. Reading leaves the generators as they were.

    `own_collate`: whether `collate` is a function of the user, which may draw; `announce`: call `set_epoch` of the
    dataset at the beginning of an epoch, in this process and in every worker.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate, *, own_collate: bool, announce: bool = False) -> None:
        self._dataset, self._seed, self.collate, self._own_collate = dataset, seed, collate, own_collate
        self._in_batches, self._announce, self._epoch = reads_batches(dataset), announce, -1
        draws = draws_randomness(dataset)
        self._may_draw = draws is not False
        self._mode: Literal["plain", "first", "unseeded", "seeded"] = "seeded" if draws else "first"
        if not self._may_draw and not own_collate:
            self._mode = "plain"
        self._drawn, self._of_samples = False, True  # whether `__getitems__` returns a list of samples
        self._before: GeneratorStates | None = None

    def fingerprint(self) -> Any:
        return fingerprint(self._dataset)

    @property
    def count(self) -> int | None:
        return length_of(self._dataset)

    def begin_epoch(self, epoch: int) -> None:
        """Workers that are started later know that the dataset was told."""
        if self._announce and epoch != self._epoch:
            self._epoch = epoch
            with RandomStream(derive_seed(self._seed, epoch) >> 1):  # the same numbers on every rank and worker
                announce_epoch(self._dataset, epoch)

    def __getitems__(self, part: Part) -> Any:
        """Called by torch's loader, whose collate function does nothing."""
        epoch, indices, rows = part
        self.begin_epoch(epoch)
        batch = self._batch(epoch, indices)
        return batch if rows is None else rows_of(batch, *rows, samples=len(indices))

    def _batch(self, epoch: int, indices: Sequence[Any]) -> Any:
        if self._mode == "plain":
            return self.collate(self._read(indices))
        before = self._before = save_states(self._before)
        if self._mode == "unseeded":
            try:
                batch = self.collate(self._read(indices))
            except Exception:
                if same_states(before, save_states(before)):
                    raise
            else:
                if (after := save_states(before)) is before or same_states(before, after):
                    return batch
            self._mode = "seeded"
        try:
            batch = self._read_seeded(epoch, indices)
        finally:
            exchange_states(before)
        if self._mode == "first":
            self._mode = "seeded" if self._drawn else "unseeded"
        return batch

    def _read_seeded(self, epoch: int, indices: Sequence[Any]) -> Any:
        if not self._may_draw:
            samples = self._read(indices)
        else:
            whole = self._in_batches and (self._mode == "first" or not self._of_samples)
            if whole:
                samples = self._seeded(self._read, list(indices), epoch, _number(indices[0]), len(indices))
                self._of_samples = isinstance(samples, list) and len(samples) == len(indices)
            if not whole or (self._drawn and self._of_samples):  # the numbers of a sample depend on no other
                samples = [self._seeded(self._read, [index], epoch, _number(index))[0] for index in indices]
        if not self._own_collate:
            return self.collate(samples)
        return self._seeded(self.collate, samples, epoch, _number(indices[0]), len(indices))

    def _seeded(self, work: Collate, items: list[Any], *parts: int) -> Any:
        seed_cpu(derive_seed(self._seed, *parts))
        if self._mode != "first" or self._drawn:
            return work(items)
        before = save_states()
        result = work(items)
        self._drawn = not same_states(before, save_states(before))
        return result

    def _read(self, indices: Sequence[Any]) -> list[Any]:
        dataset, samples = self._dataset, []
        if self._in_batches:
            return dataset.__getitems__(list(indices))  # type: ignore[no-any-return]
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:
            length = ""
            if isinstance(error, LookupError) and self.count is not None:
                length = f"; __len__ says {self.count}: check that it is the number of samples"
            error.add_note(f"paceline: {type(self._dataset).__name__}.__getitem__({index!r}) failed{length}")
            raise
        if samples[0] is None and not self._own_collate:
            raise DataError(
                "no-sample",
                f"{type(self._dataset).__name__}.__getitem__({indices[0]!r}){place_of_reading(self._dataset)} "
                "returned None.",
            )
        return samples


def reads_batches(dataset: Any) -> bool:
    """Whether the user defined `__getitems__`, which torch's loader calls with the indices of a batch."""
    if isinstance(dataset, Subset):
        return reads_batches(dataset.dataset)
    if isinstance(dataset, StackDataset):
        several = dataset.datasets
        return any(map(reads_batches, several.values() if isinstance(several, dict) else several))
    return callable(getattr(dataset, "__getitems__", None))


def place_of_reading(dataset: Any) -> str:
    """` (train.py:12)`: where the user defined __getitem__."""
    return place_of(getattr(type(dataset), "__getitem__", None))


def _number(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:  # for example a file name
        return crc32(repr(index).encode())


def fingerprint(dataset: Any) -> Any:
    """Distinguishes two datasets without reading samples, which may be slow or have side effects."""
    kind = type(dataset).__name__
    if isinstance(dataset, Subset):
        return [kind, crc32(repr(list(dataset.indices)).encode()), fingerprint(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return [kind, *(fingerprint(part) for part in dataset.datasets)]
    if isinstance(dataset, TensorDataset):
        return [kind, len(dataset), *(digest(tensor[:_ROWS]) for tensor in dataset.tensors)]
    return [kind, length_of(dataset)]


def draws_randomness(dataset: Any) -> bool | None:
    """Whether reading a sample uses random numbers; None if it is not known.

    A dataset says so with the attribute `draws_randomness`. With False, it is not watched. True is needed only for one
    that computes numbers from the state of a generator (`torch.initial_seed()`) and leaves it as it is.
    """
    if isinstance(dataset, Subset):
        return draws_randomness(dataset.dataset)
    said = getattr(dataset, "draws_randomness", False if isinstance(dataset, TensorDataset) else None)
    return None if said is None else bool(said)
