"""Datasets of whole numbers, and the micro-batches in which a run reads them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from paceline.data.adopt import LoaderSpec, adopt, recognize
from paceline.data.loader import DataShard, MicroBatch


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Noisy(Numbers):
    """Draws from all three generators that augmentations draw from."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, n: int, shuffled: bool = False) -> None:
        self.n, self.shuffled = n, shuffled

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.n) if self.shuffled else torch.arange(self.n)
        yield from order


def spec_for(batch: int = 10, rank: int = 0, ranks: int = 1, groups: int = 1, **changes: Any) -> LoaderSpec:
    values = {"seed": 0, "shuffle": True, "workers": 0, "pin_memory": False, **changes}
    return LoaderSpec(batch=batch, part=DataShard(rank, ranks, groups), **values)


def micros(data: Any, spec: LoaderSpec, first: int = 0, epochs: int = 1) -> list[MicroBatch]:
    return list(adopt(recognize(data, 0), spec, lambda text: None).micros(first, epochs))


def samples_by_step(data: Any, ranks: int, batch: int = 10, epochs: int = 1, **changes: Any) -> list[list[float]]:
    """The samples of each step, over all ranks; stand-ins (weight zero) left out."""
    steps: dict[int, list[float]] = {}
    for rank in range(ranks):
        for micro in micros(data, spec_for(batch, rank, ranks, **changes), epochs=epochs):
            own = micro.batch[0] if isinstance(micro.batch, (list, tuple)) else micro.batch
            steps.setdefault(micro.step, []).extend(own.tolist() if micro.samples else [])
    return [steps[step] for step in sorted(steps)]
