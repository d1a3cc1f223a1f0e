"""Positions in the data, without a model: the data of a run, read by changing numbers of ranks.

The loader's whole state is a number of steps. Whatever ranks and accumulation groups read, however often they begin
anew and at whichever step, each step has to hold the samples that one rank reads without a stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from hypothesis import strategies as st
from torch.utils.data import Dataset

from paceline.data.loader import DataShard, IndexedLoader, ReadOptions
from paceline.data.sample_order import FormulaOrder

EPOCHS = 2


class Numbers(Dataset[int]):
    draws_randomness = False

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


@dataclass(frozen=True)
class Start:
    """A start of the run: by these ranks, for so many steps, of which the last ones are lost."""

    ranks: int
    groups: int
    steps: int
    lost: int


@dataclass(frozen=True)
class Data:
    n: int
    batch: int
    seed: int
    shuffle: bool


def data() -> st.SearchStrategy[Data]:
    return st.builds(Data, st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**32), st.booleans())


def starts() -> st.SearchStrategy[list[Start]]:
    numbers = (st.integers(1, 8), st.integers(1, 5), st.integers(0, 20), st.integers(0, 3))
    return st.lists(st.builds(Start, *numbers), min_size=1, max_size=6)


def check(data: Data, starts: list[Start]) -> None:
    expected = _read(data, Start(1, 1, 0, 0), 0, None)
    assert sorted(index for samples in expected for index in samples) == sorted([*range(data.n)] * EPOCHS)
    per_epoch = -(-data.n // data.batch)
    first = sorted(index for samples in expected[:per_epoch] for index in samples)
    assert first == list(range(data.n)), "an epoch has each sample once"
    trained: list[list[int]] = []
    for start in starts:
        trained += _read(data, start, len(trained), len(trained) + start.steps)
        del trained[max(0, len(trained) - start.lost) :]
    trained += _read(data, starts[-1], len(trained), None)
    assert trained == expected


def _read(data: Data, start: Start, first: int, until: int | None) -> list[list[int]]:
    """The samples of each step, in the order of its global batch, over all ranks."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for rank in range(start.ranks):
        order = FormulaOrder(data.n, data.batch, data.seed, shuffle=data.shuffle)
        part = DataShard(rank, start.ranks, min(start.groups, data.batch))
        micros = IndexedLoader(Numbers(data.n), order, part, data.seed, ReadOptions()).micros(first, EPOCHS)
        for micro in takewhile(lambda micro: until is None or micro.step < until, micros):
            read = micro.batch.tolist()[: micro.samples]
            steps.setdefault(micro.step, []).extend((micro.start + n, index) for n, index in enumerate(read))
    for step, samples in steps.items():
        assert [place for place, _ in sorted(samples)] == list(range(len(samples))), f"places in step {step}"
    return [[index for _, index in sorted(steps[step])] for step in sorted(steps)]
