from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data.adopt import adopt, recognize
from reading import Numbers, micros, samples_by_step, spec_for

DATA = Numbers(20)


class Batches(Sampler[list[int]]):
    """A batch sampler that draws when it is asked for its iterator, and not when it is read."""

    def __init__(self, generator: torch.Generator) -> None:
        self.inner = RandomSampler(DATA, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.inner)
        return iter([order[start : start + 5] for start in range(0, 20, 5)])

    def __len__(self) -> int:
        return 4


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def both(build: Callable[[torch.Generator], Any]) -> DataLoader[Any]:
    """The same generator for the sampler and for the loader, as a user would."""
    generator = seeded()
    return DataLoader(DATA, batch_size=5, sampler=build(generator), generator=generator)


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(DATA, batch_size=5, shuffle=True, generator=seeded()),
    "shuffle, persistent workers": lambda: DataLoader(
        DATA, batch_size=5, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "random": lambda: DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, generator=seeded())),
    "replacement": lambda: both(lambda own: RandomSampler(DATA, replacement=True, num_samples=70, generator=own)),
    "weighted": lambda: both(lambda own: WeightedRandomSampler([1.0] * 20, 15, generator=own)),
    "subset": lambda: DataLoader(DATA, batch_size=5, sampler=SubsetRandomSampler(range(9), generator=seeded())),
    "batches": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=seeded()), 5, drop_last=True)
    ),
    "own batches": lambda: DataLoader(DATA, batch_sampler=Batches(generator := seeded()), generator=generator),
    "ready batches": lambda: DataLoader(
        TensorDataset(torch.arange(20).reshape(4, 5)), batch_size=None, shuffle=True, generator=seeded()
    ),
}


def plain(loader: DataLoader[Any], epochs: int = 3) -> list[list[int]]:
    batches = [batch for _ in range(epochs) for batch in loader]
    return [(batch[0] if isinstance(batch, (list, tuple)) else batch).tolist() for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_a_users_generator_is_that_of_a_plain_loop(kind: str) -> None:
    build, expected = KINDS[kind], plain(KINDS[kind]())
    assert samples_by_step(build(), 1, batch=5, epochs=3) == expected
    by_rank = [
        [(m.step, *_values(m.batch)) for m in micros(build(), spec_for(5, rank, 2), epochs=3)] for rank in range(2)
    ]
    assert [[*a[1:], *b[1:]] for a, b in zip(*by_rank, strict=True)] == expected
    for first in (1, len(expected) // 3, len(expected) - 1):  # a resumed run
        assert [_values(m.batch) for m in micros(build(), spec_for(5), first=first, epochs=3)] == expected[first:]


def _values(batch: Any) -> list[int]:
    values: list[int] = (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_of_train_continues_the_users_generator(kind: str) -> None:
    expected, loader, seen = plain(KINDS[kind]()), KINDS[kind](), []
    per_epoch = len(expected) // 3
    for first, stop in ((0, 1), (1, per_epoch + 1), (per_epoch + 1, 3 * per_epoch)):
        # Each call has a loader of its own, and reads a little ahead.
        stream = adopt(recognize(loader, 0), spec_for(5), lambda text: None).micros(first, 3)
        seen += [_values(next(stream).batch) for _ in range(stop - first)]
        next(stream, None)
    assert seen == expected


def test_a_generator_that_the_user_seeds_for_every_epoch_is_respected() -> None:
    generator = torch.Generator()
    loader = DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, generator=generator))
    for epoch in range(3):
        generator.manual_seed(epoch)
        expected = plain(loader, epochs=1)
        generator.manual_seed(epoch)
        assert [_values(m.batch) for m in micros(loader, spec_for(5), first=4 * epoch, epochs=epoch + 1)] == expected


def test_a_sampler_with_state_is_not_replayed_for_epochs_it_has_already_read() -> None:
    class Own(Sampler[int]):
        def __init__(self) -> None:
            self.random = np.random.default_rng(3)

        def __iter__(self) -> Iterator[int]:
            return iter(self.random.permutation(20).tolist())

        def __len__(self) -> int:
            return 20

    def loader() -> DataLoader[Any]:
        return DataLoader(DATA, batch_size=5, sampler=Own())

    expected, kept = plain(loader()), loader()
    by_epoch = [m for epoch in range(3) for m in micros(kept, spec_for(5), first=4 * epoch, epochs=epoch + 1)]
    assert [_values(m.batch) for m in by_epoch] == expected
    assert [_values(m.batch) for m in micros(loader(), spec_for(5), first=9, epochs=3)] == expected[9:]


class Growing(Sampler[int]):
    """Ten samples more in every epoch, up to forty."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 10 * min(self.epoch + 1, 4)


class GrowingBatches(BatchSampler):
    """set_epoch is that of the sampler inside it."""

    def __len__(self) -> int:
        return super().__len__()


class GrowingShare(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 10 * min(self.epoch + 1, 4)


LOADERS = {
    "sampler": lambda: DataLoader(Numbers(40), batch_size=10, sampler=Growing()),
    "batch sampler": lambda: DataLoader(Numbers(40), batch_sampler=GrowingBatches(Growing(), 10, False)),
    "distributed": lambda: DataLoader(Numbers(40), batch_size=10, sampler=GrowingShare(Numbers(40), 1, 0)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_resumes_in_the_epoch_in_which_it_stopped_if_epochs_grow(kind: str) -> None:
    build = LOADERS[kind]
    whole = [(m.epoch, m.step, m.batch.tolist()) for m in micros(build(), spec_for(), epochs=5)]
    assert [epoch for epoch, *_ in whole] == [0, 1, 1, 2, 2, 2, *[3] * 4, *[4] * 4]
    for first in range(len(whole)):
        rest = micros(build(), spec_for(), first=first, epochs=5)
        assert [(m.epoch, m.step, m.batch.tolist()) for m in rest] == whole[first:]


def test_steps_per_epoch_are_unknown_if_they_change() -> None:
    lengths = adopt(LOADERS["sampler"](), spec_for(), lambda text: None).lengths
    assert (lengths.per_epoch, lengths.before(3), lengths.locate(4)) == (None, 6, (2, 1))
    fixed = adopt(Numbers(40), spec_for(), lambda text: None).lengths
    assert (fixed.per_epoch, fixed.before(3), fixed.locate(9), fixed.before(None)) == (4, 12, (2, 1), None)


def test_a_sampler_may_reject_epochs_beyond_its_plan() -> None:
    class Planned(Growing):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = [0, 0, 1][epoch]

    loader = DataLoader(Numbers(40), batch_size=10, sampler=Planned())
    assert [m.epoch for m in micros(loader, spec_for(), first=1, epochs=3)] == [1, 2, 2]


def test_a_sampler_that_does_not_know_its_length_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Estimated(Growing):
        set_epoch = None  # type: ignore[assignment]

        def __iter__(self) -> Iterator[int]:
            return iter(range(25))

        def __len__(self) -> int:
            return 40

    loader = DataLoader(Numbers(40), batch_size=10, sampler=Estimated())
    assert len(micros(loader, spec_for(), epochs=2)) == 6
    assert capsys.readouterr().out.count("yielded 3 batches in epoch 0, but its length says 4") == 1
