"""Reads an IterableDataset in worker processes, which are started for every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.epoch_reader import announce_epoch
from paceline.data.loader import ReadOptions, unchanged
from paceline.runtime.rng import derive_seed

T = TypeVar("T")


def read_in_workers(
    dataset: Any, epoch: int, read: Callable[[Iterator[Any]], Iterator[T]], seed: int, reading: ReadOptions
) -> DataLoader[T]:
    """What `read` makes of the samples of an epoch. The results of several workers alternate."""
    return DataLoader(
        _Epoch(dataset, epoch, read),
        batch_size=None,
        num_workers=reading.workers,
        collate_fn=unchanged,
        pin_memory=reading.pin_memory,
        # The same on every rank: a stream that shuffles has to shuffle equally, also before it is split.
        generator=torch.Generator().manual_seed(derive_seed(seed, epoch) >> 1),
        **reading.for_dataset(dataset),
    )


class _Epoch(IterableDataset[T]):
    def __init__(self, dataset: Any, epoch: int, read: Callable[[Iterator[Any]], Iterator[T]]) -> None:
        self._dataset, self._epoch, self._read = dataset, epoch, read

    def __iter__(self) -> Iterator[T]:
        announce_epoch(self._dataset, self._epoch)
        return self._read(iter(self._dataset))
