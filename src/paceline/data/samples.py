"""Randomness belongs to the sample, not to the worker.

`__getitem__` and augmentation run under generators seeded by (seed, epoch, index): a sample looks the same whichever
rank or worker reads it, and another way in the next epoch.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from torch.utils.data import Dataset, Subset, TensorDataset

from paceline.runtime.seeds import mix, seed_cpu

Key = tuple[int, Any]


class SeededSamples(Dataset[Any]):
    """A dataset addressed by (epoch, index), which seeds the generators before it reads."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self.draws = draws_randomness(dataset)

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        if self.draws:
            seed_cpu(mix(self._seed, epoch, index if isinstance(index, int) else crc32(repr(index).encode())))
        return self._dataset[index]


def draws_randomness(dataset: Any) -> bool:
    """Whether reading a sample may draw random numbers. Seeding costs 30 µs a sample: not paid where it can't matter.

    A dataset says so with the attribute `draws_randomness = False`; torch's tensor sets are known not to.
    """
    if isinstance(dataset, Subset):
        return draws_randomness(dataset.dataset)
    return bool(getattr(dataset, "draws_randomness", not isinstance(dataset, TensorDataset)))
