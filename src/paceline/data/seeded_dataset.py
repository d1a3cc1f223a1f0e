"""Seeds random numbers per sample instead of per worker.

`__getitem__` and augmentation run under generators seeded by (seed, epoch, index): a sample is the same on any rank and
worker, and differs between epochs. A custom collate function is seeded by its batch.
"""

from __future__ import annotations

import operator
from typing import Any
from zlib import crc32

from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from paceline.data.batches import digest
from paceline.errors import DataError
from paceline.run.user_frame import place_of
from paceline.runtime.rng import derive_seed, seed_cpu

Key = tuple[int, Any]

_ROWS = 16  # of a tensor, enough to distinguish two datasets


class SeededSamples(Dataset[Any]):
    """A dataset indexed by (epoch, index) that seeds the generators before reading and before collating."""

    def __init__(self, dataset: Any, seed: int, *, own_collate: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._reading_draws = draws_randomness(dataset)
        self._own_collate = own_collate
        self.draws = self._reading_draws or own_collate

    def fingerprint(self) -> Any:
        return fingerprint(self._dataset)

    @property
    def count(self) -> int | None:
        return len(self._dataset) if hasattr(self._dataset, "__len__") else None

    def __getitem__(self, key: Key) -> Any:
        if self._reading_draws:
            seed_cpu(derive_seed(self._seed, *_numbers(key)))
        try:
            return self._dataset[key[1]]
        except Exception as error:
            length = ""
            if isinstance(error, LookupError) and self.count is not None:
                length = f"; __len__ says {self.count}: check that it is the number of samples"
            error.add_note(f"paceline: {type(self._dataset).__name__}.__getitem__({key[1]!r}) failed{length}")
            raise

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Called by torch's loader, which collates the result immediately afterwards."""
        samples = [self[key] for key in keys]
        if self._own_collate:
            seed_cpu(derive_seed(self._seed, *_numbers(keys[0]), len(keys)))
        elif samples[0] is None:
            raise DataError(
                "no-sample",
                f"{type(self._dataset).__name__}.__getitem__({keys[0][1]!r}){place_of_reading(self._dataset)} "
                "returned None.",
                fix="end it with a return statement",
            )
        return samples

    def __getattr__(self, name: str) -> Any:
        """A `worker_init_fn` may access attributes of the user's dataset."""
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


def place_of_reading(dataset: Any) -> str:
    """` (train.py:12)`: where the user defined __getitem__."""
    return place_of(getattr(type(dataset), "__getitem__", None))


def _numbers(key: Key) -> tuple[int, int]:
    epoch, index = key
    try:
        return epoch, operator.index(index)
    except TypeError:  # for example a file name
        return epoch, crc32(repr(index).encode())


def fingerprint(dataset: Any) -> Any:
    """Distinguishes two datasets without reading samples, which may be slow or have side effects."""
    kind = type(dataset).__name__
    if isinstance(dataset, Subset):
        return [kind, crc32(repr(list(dataset.indices)).encode()), fingerprint(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return [kind, *(fingerprint(part) for part in dataset.datasets)]
    if isinstance(dataset, TensorDataset):
        return [kind, len(dataset), *(digest(tensor[:_ROWS]) for tensor in dataset.tensors)]
    return [kind, len(dataset) if hasattr(dataset, "__len__") else None]


def draws_randomness(dataset: Any) -> bool:
    """Whether reading a sample may use random numbers. If not, seeding (30 µs per sample) is skipped.

    A dataset opts out with the attribute `draws_randomness = False`; a TensorDataset always does.
    """
    if isinstance(dataset, Subset):
        return draws_randomness(dataset.dataset)
    return bool(getattr(dataset, "draws_randomness", not isinstance(dataset, TensorDataset)))
