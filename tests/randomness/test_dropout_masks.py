"""Dropout masks are uniform, and independent over elements, samples, steps, calls, scopes and seeds.

With 2.3 million pairs at each distance, a correlation of 0.004 is 6 standard deviations; the limits, 3.3 to 5.5, allow
for the number of comparisons. `make soak-dropout` has 400 times as many and finds correlations of 2e-4.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.models.dropout.functions import by_sample
from paceline.runtime.noise import NoiseContext
from randomness import generators, measures
from randomness.generators import BLOCKS, Numbers, Place, Samples
from randomness.measures import KINDS, Result


def correlations(kind: str) -> Callable[[Numbers], list[Result]]:
    return lambda numbers: measures.correlations(numbers, kind, 0.5, (32, 256), batch=4, blocks=9)


def patterns(numbers: Numbers) -> list[Result]:
    return [measures.patterns(numbers, kind, 2) for kind in ("row", "column", *KINDS)]


TESTS: dict[str, Callable[[Numbers], list[Result]]] = {
    "share": lambda numbers: [measures.shares(numbers, 3, (0.01, 0.1, 0.5, 0.9))],  # 0.0017 at 6 sigma, p = 0.5
    "bits": lambda numbers: [measures.bits(numbers, 2)],  # a bit that is one in 0.502 of the numbers
    "variance": lambda numbers: [measures.dispersion(numbers, p, 1) for p in (0.1, 0.5)],  # 0.2 of that of a row's sum
    "patterns": patterns,  # of 8 neighbours: their relative frequencies vary by 0.03
    "any two": lambda numbers: [measures.all_pairs(numbers, (16, 32), 3)],  # a correlation of 0.27
    "duplicates": lambda numbers: [measures.duplicates(numbers, 8)],  # a state of 31 bits
    "ranks": lambda numbers: [measures.ranks(numbers, 2)],  # 0.06 of the matrices
    "avalanche": lambda numbers: [measures.avalanche(numbers, 1, (8, 8, 64))],  # a bit that changes in 0.55 of cases
    **{kind: correlations(kind) for kind in KINDS},
    "heads": lambda numbers: measures.correlations(numbers, "call", 0.1, (4, 32, 64), batch=4, blocks=9),
}

BAD: list[tuple[str, str, Numbers]] = [
    ("share", "too few dropped", generators.too_few_dropped),
    ("bits", "16 bits", generators.sixteen_bits),
    ("variance", "evenly spread", generators.evenly_spread),
    ("patterns", "evenly spread", generators.evenly_spread),
    ("any two", "seed plus step", generators.sums_of_seed_and_step),
    ("duplicates", "state of 16 bits", generators.short_state),
    ("duplicates", "256 keys", generators.few_keys),
    ("ranks", "rows times columns", generators.rows_times_columns),
    ("avalanche", "steps of 16 bits", generators.steps_of_16_bits),
    *((kind, f"without {kind}", generators.without(kind)) for kind in KINDS),
    ("sample", "sample plus column", generators.sums_of_sample_and_column),
    ("heads", "rows times columns", generators.rows_times_columns),
]


def test_the_numbers_under_test_are_those_of_a_model() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Dropout(0.1)) for _ in range(2))})
    with NoiseContext(7, keys=by_sample(model, BLOCKS, 7, torch.device("cpu"))) as context:
        context.begin(Samples(5, start=2, step=3, step_samples=7))
        zeros = model["blocks"][1](torch.ones(5, 4, 9, 33)) == 0
        context.end()
    numbers = generators.dropout(Place(seed=7, step=3, scope=1, call=0, sample=2), 5, (4, 9, 33))
    assert torch.equal(zeros, generators.dropped(numbers, 0.1))


@pytest.mark.parametrize("test", TESTS)
def test_masks_are_random(test: str) -> None:
    results = TESTS[test](generators.dropout)
    limit = measures.limit(results)
    assert {result.test: result.worst for result in results if result.worst > limit} == {}


@pytest.mark.parametrize(("test", "numbers"), [(test, numbers) for test, _, numbers in BAD], ids=[b for _, b, _ in BAD])
def test_a_bad_generator_is_recognised(test: str, numbers: Numbers) -> None:
    results = TESTS[test](numbers)
    assert max(result.worst for result in results) > measures.limit(results)
