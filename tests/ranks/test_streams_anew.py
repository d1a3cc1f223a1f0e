"""Streams that are read again: on another number of ranks, and with other random numbers than the first time."""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import paceline
from heard import heard
from worlds import run_on_ranks

SAMPLES = 48


SPLIT_BY_NODE = SimpleNamespace(__name__="split_by_node")  # a stage of webdataset's pipelines


class Split(IterableDataset[torch.Tensor]):
    """As a webdataset that is split by node and by worker."""

    def __init__(self) -> None:
        self.pipeline = [SPLIT_BY_NODE]

    def __iter__(self) -> Iterator[torch.Tensor]:
        own = range(SAMPLES)[paceline.dist.rank() :: paceline.dist.world()]
        worker = get_worker_info()
        yield from map(torch.tensor, own[worker.id :: worker.num_workers] if worker else own)


class Loader(IterableDataset[Any]):
    """As webdataset.WebLoader."""

    def __init__(self, dataset: Any, **settings: Any) -> None:
        self.pipeline = [DataLoader(dataset, **settings)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline[0])


def train(data: Any, run: Any = False, **limits: Any) -> tuple[collections.Counter[int], list[str]]:
    """What all ranks have read, and the warnings of rank 0."""
    seen: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if model.training and torch.is_grad_enabled():
            seen.extend(batch.tolist())
        return model(batch.float()[:, None]).mean()

    settings: dict[str, Any] = {"run": run, "resume": "auto" if run else None, "quiet": True, "preflight": not run}
    batch = None if isinstance(data, (DataLoader, Loader)) else 8
    with heard() as said:
        paceline.Trainer(nn.Linear(1, 1), loss_fn=loss, batch=batch, **settings).train(data, **limits)
    return collections.Counter(each for rank in paceline.dist.all_gather_object(seen) for each in rank), said


def in_loader() -> Any:
    world = paceline.dist.world()
    return Loader(Split(), batch_size=8 // world, num_workers=world)


@pytest.mark.parametrize(
    ("data", "worlds"),
    [
        (Split, (1, 2)),
        (Split, (2, 1)),
        (in_loader, (1, 2)),
        pytest.param(in_loader, (2, 1), marks=pytest.mark.nightly),
        pytest.param(Split, (2, 4), marks=pytest.mark.nightly),
    ],
)
def test_a_split_stream_continues_on_another_number_of_ranks(
    worlds: tuple[int, int], data: Any, tmp_path: Path
) -> None:
    def begin() -> None:
        train(data(), str(tmp_path / "ended"), epochs=1)
        train(data(), str(tmp_path / "amid"), max_steps=2)

    def resume() -> None:
        read, said = train(data(), str(tmp_path / "ended"), epochs=2)
        assert set(read.values()) == {1} and len(read) == SAMPLES and said == []
        read, said = train(data(), str(tmp_path / "amid"), epochs=1)
        assert sum(read.values()) == SAMPLES - 16
        assert paceline.dist.rank() or (len(said) == 1 and f"split across {worlds[0]} rank" in said[0])

    run_on_ranks(worlds[0], begin)
    run_on_ranks(worlds[1], resume)


def test_the_batch_of_a_loader_around_a_split_stream_is_told_to_be_that_of_a_rank(tmp_path: Path) -> None:
    def resume() -> None:
        with pytest.raises(paceline.errors.CheckpointError, match="batch was 8, now 16") as caught:
            train(Loader(Split(), batch_size=8), str(tmp_path / "moved"), epochs=1)
        assert "divide it by their number" in str(caught.value)

    train(Loader(Split(), batch_size=8), str(tmp_path / "moved"), max_steps=2)
    run_on_ranks(2, resume)


class Shuffled(IterableDataset[torch.Tensor]):
    def __init__(self, how: str) -> None:
        self.how, self.passes = how, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        seeds = {"unseeded": os.urandom(8), "seeded": 0, "counted": self.passes, "global": random.random()}
        order = random.Random(seeds[self.how]).sample(range(SAMPLES), SAMPLES)
        yield from map(torch.tensor, order)


@pytest.mark.parametrize("how", ["unseeded", "seeded", "counted", "global"])
def test_a_stream_that_is_shuffled_in_another_way_each_time_is_named(how: str) -> None:
    settings: dict[str, Any] = {"batch_size": 8, "num_workers": 1}
    for data in (Shuffled(how), DataLoader(Shuffled(how), **settings), Loader(Shuffled(how), **settings)):
        for _ in range(2):  # it is named once
            said = train(data, max_steps=1)[1]
            assert how != "unseeded" or said[0].startswith("[data.unrepeatable] Two passes over"), said
            assert len(said) == (how == "unseeded")
            how = how if how != "unseeded" else "known"
        how = how if how != "known" else "unseeded"


class Counting(DataLoader[torch.Tensor]):
    """Each pass is of another epoch, as in loaders that count epochs themselves."""

    def __iter__(self) -> Any:
        assert isinstance(self.dataset, Numbered)
        self.dataset.epoch += 1
        return super().__iter__()


class Numbered(IterableDataset[torch.Tensor]):
    epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4 * SAMPLES).reshape(-1, 8) % SAMPLES + self.epoch


def test_a_loader_that_counts_its_passes_has_as_many_on_every_rank() -> None:
    def body() -> None:
        train(Counting(Numbered(), batch_size=None, num_workers=1), max_steps=1)  # or data.different-data

    run_on_ranks(2, body)
