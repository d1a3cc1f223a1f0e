"""Saved states of the global generators, compared with what the official functions return."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.adopt import adopt, recognize
from paceline.runtime import generator_states
from paceline.runtime.generator_states import RandomStream, exchange_states, same_states, save_states
from paceline.runtime.rng import seed_cpu
from reading import spec_for

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.seed": lambda: random.seed(7),
    "numpy": numpy.random.rand,
    "numpy.randn": numpy.random.randn,
    "numpy.seed": lambda: numpy.random.seed(7),
    "torch": lambda: torch.rand(1),
    "torch.randn": lambda: torch.randn(1),
    "torch.seed": lambda: torch.manual_seed(7),
}


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = save_states()
    yield
    generator_states._memory.bits = None  # search again
    exchange_states(before)


def official() -> str:
    with numpy.printoptions(threshold=10_000):
        return str((random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist()))


@pytest.fixture(params=["words", "official functions"])
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the words are not found in memory."""
    if request.param == "official functions":
        monkeypatch.setattr(generator_states._memory, "python", None)
        generator_states._memory.find(numpy.random.mtrand.get_bit_generator())


def test_the_words_of_all_three_generators_are_found() -> None:
    assert len(save_states().marks) > 1


@pytest.mark.parametrize("cached", [False, True], ids=["", "with a cached Gaussian number"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.usefixtures("words")
def test_every_draw_is_seen_and_undone(draw: str, cached: bool) -> None:
    for _ in range(cached):
        random.gauss(0, 1), numpy.random.randn(), torch.randn(1)
    saved, before = save_states(), official()
    assert same_states(saved, save_states()) and same_states(saved, save_states(saved))
    DRAWS[draw]()
    drawn, after = save_states(saved), official()
    assert not same_states(saved, drawn) and after != before
    replaced = exchange_states(saved)
    assert official() == before and same_states(replaced, drawn)
    for states, expected in ((replaced, after), (saved, before)) * 2:
        exchange_states(states)
        assert official() == expected


@pytest.mark.usefixtures("words")
def test_a_bit_generator_that_was_installed_meanwhile_is_replaced() -> None:
    saved, before = save_states(), official()
    numpy.random.mtrand.set_bit_generator(numpy.random.PCG64(3))
    numpy.random.randn()
    expected = save_states()
    numbers = numpy.random.randn(3).tolist()
    exchange_states(saved)
    assert official() == before
    exchange_states(expected)
    assert numpy.random.randn(3).tolist() == numbers
    exchange_states(saved)
    assert official() == before


STEPS = 300  # in an epoch
STREAM_DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": numpy.random.randn,
    "torch": lambda: torch.randn(1).item(),
}
# Whether a source draws for (epoch, step); step -1 is the start of an epoch.
WHEN: dict[str, Callable[[int, int], bool]] = {
    "always": lambda epoch, step: True,
    "in __iter__": lambda epoch, step: step == -1,
    "late": lambda epoch, step: step in (250, 251, 299),
    "in the second epoch": lambda epoch, step: epoch == 1 and step > 7,
}


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(), numpy.random.rand(), numpy.random.randn(), torch.rand(()).item()


class Drawing:
    epoch = 0

    def __init__(self, generator: str, when: str) -> None:
        self._draw, self._when = STREAM_DRAWS[generator], WHEN[when]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = self._draw() if self._when(self.epoch, -1) else 0.0
        return self._batches(self.epoch, first)

    def _batches(self, epoch: int, first: float) -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            yield torch.tensor([first, self._draw() if self._when(epoch, step) else 0.0])


class DrawingSamples(Drawing, IterableDataset[torch.Tensor]):
    def _batches(self, epoch: int, first: float) -> Iterator[torch.Tensor]:
        for batch in super()._batches(epoch, first):
            yield from batch


KINDS: dict[str, Callable[[str, str], Any]] = {
    "batches": Drawing,
    "IterableDataset": lambda *how: DataLoader(DrawingSamples(*how), batch_size=2),
}


def read(source: Any, seed: int, first: int = 0) -> tuple[list[list[float]], list[Any]]:
    """Batches of two epochs, and what a training that draws after each of them gets."""
    seed_cpu(seed)
    micros = adopt(recognize(source, 0), spec_for(2), lambda text: None).micros(first, 2)
    pairs = [(micro.batch.tolist(), draw()) for micro in micros]
    return [batch for batch, _ in pairs], [numbers for _, numbers in pairs]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("generator", STREAM_DRAWS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_source_draws_does_not_depend_on_training(kind: str, generator: str, when: str) -> None:
    batches, numbers = read(KINDS[kind](generator, when), seed=1)
    elsewhere, _ = read(KINDS[kind](generator, when), seed=2)  # as on another rank
    resumed, _ = read(KINDS[kind](generator, when), seed=3, first=STEPS + 20)
    assert elsewhere == batches and resumed == batches[STEPS + 20 :]
    of_epoch = [{value for batch in batches[start : start + STEPS] for value in batch if value} for start in (0, STEPS)]
    assert of_epoch[1] and not of_epoch[0] & of_epoch[1]
    seed_cpu(1)
    assert numbers == [draw() for _ in batches]


def test_a_stream_has_the_same_numbers_in_a_worker() -> None:
    class FromAll(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            for _ in range(4):
                yield from draw()

    loaders = [DataLoader(FromAll(), batch_size=5, num_workers=workers) for workers in (0, 1)]
    assert read(loaders[0], seed=1)[0] == read(loaders[1], seed=2)[0]


def test_a_stream_continues_where_it_left_off_and_leaves_the_others_alone() -> None:
    seed_cpu(5)
    expected = [draw(), draw()]
    seed_cpu(9)
    outside = [draw(), draw()]
    stream = RandomStream(5)
    seed_cpu(9)
    with stream:
        inside = [draw()]
    found = [draw()]
    with stream:
        inside.append(draw())
    assert inside == expected and [*found, draw()] == outside


def test_an_error_of_a_source_leaves_the_numbers_of_training() -> None:
    def broken() -> Iterator[int]:
        yield random.randrange(9)
        random.random()
        raise OSError("no more")

    seed_cpu(4)
    expected = draw()
    seed_cpu(4)
    items = RandomStream(5).read(broken())
    next(items)
    with pytest.raises(OSError, match="no more"):
        next(items)
    assert draw() == expected
