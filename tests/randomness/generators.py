"""Numbers by place: those of paceline's dropout, and bad ones that the tests of this folder must recognise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.models.dropout.mask import hash_elements, threshold
from paceline.runtime.sample_keys import SampleKeys

BLOCKS = [f"blocks.{number}" for number in range(12)]


@dataclass(frozen=True)
class Place:
    """What a mask is computed from, besides the coordinates of its elements."""

    seed: int = 0
    step: int = 0
    scope: int = 0  # number of the block
    call: int = 0
    sample: int = 0  # the first one


Numbers = Callable[[Place, int, tuple[int, ...]], Tensor]  # int32 numbers of (samples, *shape)
_seeds: dict[int, SampleKeys] = {}


@dataclass
class Samples:
    samples: int
    start: int
    step: int
    step_samples: int = 0


def dropout(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """What nn.Dropout compares with its threshold."""
    if place.seed not in _seeds:
        _seeds.clear()
        _seeds[place.seed] = SampleKeys(place.seed, torch.device("cpu"), BLOCKS)
        _seeds[place.seed].watches = False
    keys = _seeds[place.seed]
    keys.begin(Samples(samples, place.sample, place.step))
    keys.current = keys.inside[BLOCKS[place.scope]]
    own = keys.own()
    assert own is not None
    return hash_elements(own, place.call, (samples, *shape))


def dropped(numbers: Tensor, p: float) -> Tensor:
    return numbers < threshold(p)


# Bad generators.


def same_stride(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """Two rounds on (random number of the row + column), the second one with another such number: what these tests
    found first. Columns 12 apart have a correlation of 5e-4, which takes 2e8 pairs to see."""
    rows = dropout(place, samples, (*shape[:-1], 2))
    state = _round(rows[..., :1] + torch.arange(shape[-1], dtype=torch.int32), 16, 0x7FEB352D)
    return _round(state ^ rows[..., 1:], 15, 0x846CA68B)


def _round(state: Tensor, shift: int, factor: int) -> Tensor:
    return (state ^ ((state >> shift) & ((1 << (32 - shift)) - 1))) * (factor - (1 << 32) * (factor >> 31))


def without(field: str) -> Numbers:
    """The step, for example, is ignored."""
    if field == "sample":
        return lambda place, samples, shape: dropout(replace(place, sample=0), 1, shape).expand(samples, *shape)
    return lambda place, samples, shape: dropout(replace(place, **{field: 0}), samples, shape)


def sums_of_seed_and_step(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """Seed 1 repeats what seed 0 had one step later."""
    return dropout(replace(place, seed=0, step=place.seed + place.step), samples, shape)


def sums_of_sample_and_column(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    wide = dropout(replace(place, sample=0), 1, (*shape[:-1], place.sample + samples + shape[-1]))[0]
    starts = range(place.sample, place.sample + samples)
    return torch.stack([wide[..., start : start + shape[-1]] for start in starts])


def rows_times_columns(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """Any two rows are equal or opposite."""
    rows = dropout(place, samples, (*shape[:-1], 1))
    return rows ^ dropout(replace(place, call=place.call + 1000), samples, (*[1] * (len(shape) - 1), shape[-1]))


def short_state(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """A generator with a state of 16 bits, indexed by the flat position."""
    period = dropout(Place(), 1, (1, 1 << 16))[0, 0]
    start = int(dropout(place, 1, (1, 1))) & 0xFFFF
    count = samples * torch.Size(shape).numel()
    return period[(torch.arange(count) + start) % len(period)].view(samples, *shape)


def few_keys(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """256 different masks."""
    places = dropout(place, samples, (1, 1)).flatten().tolist()
    return torch.cat([dropout(Place(step=number & 0xFF), 1, shape) for number in places])


def too_few_dropped(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """One in 200 of those to drop is kept."""
    numbers, kept = dropout(place, samples, shape), dropout(replace(place, call=place.call + 1000), samples, shape)
    return torch.where(dropped(kept, 0.005), torch.full_like(numbers, (1 << 31) - 1), numbers)


def sixteen_bits(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    return dropout(place, samples, shape) & -0x10000


def steps_of_16_bits(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """Step 65,536 repeats step 0."""
    return dropout(replace(place, step=place.step & 0xFFFF), samples, shape)


def evenly_spread(place: Place, samples: int, shape: tuple[int, ...]) -> Tensor:
    """A low-discrepancy sequence along each row."""
    columns = torch.arange(shape[-1], dtype=torch.int32) * (0x9E3779B1 - (1 << 32))
    return dropout(place, samples, (*shape[:-1], 1)) + columns
