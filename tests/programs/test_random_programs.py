"""Random training programs give the result of plain PyTorch in one process, or are refused or warned about by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import pytest

import parity
import worlds
from programs.outcome import try_program
from programs.program import Program, draw

NUMBERS = range(60)  # `make soak-programs` tries 3,000


def choices_of(number: int) -> set[tuple[str, object]]:
    """What is chosen in a program, part by part."""
    parts = asdict(draw(number)) | {"number": None}
    return {(part, choice is not None if part == "stop" else choice) for part, choice in parts.items()}


def those_that_show_most() -> list[int]:
    """Each choice that is made in any of NUMBERS is made in one of these, and none of these can be left out."""
    chosen = {number: choices_of(number) for number in NUMBERS}
    made = Counter(choice for choices in chosen.values() for choice in choices)
    for number in NUMBERS:
        if all(made[choice] > 1 for choice in chosen[number]):
            made.subtract(chosen.pop(number))
    return list(chosen)


USUAL = those_that_show_most()


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in USUAL else pytest.mark.nightly) for number in NUMBERS]
)
def test_no_program_is_silently_wrong(number: int) -> None:
    outcome = try_program(draw(number), run=worlds.run_on_ranks)
    assert not outcome.is_violation, f"{outcome.kind}: {outcome.program}\n{outcome.text}"


@pytest.mark.parametrize("fault", ["mean of means", "repeated samples"])
def test_the_comparison_finds_a_fault_that_is_built_in(fault: str) -> None:
    program = Program(0, "mlp", "sum-and-weight", "tensors", "sgd", "steps", "ddp:3")
    assert try_program(program, run=worlds.run_on_ranks).kind == "same"
    assert try_program(program, parity.FAULTS[fault]).kind == "silent"


def test_a_number_is_one_program() -> None:
    assert [draw(number) for number in range(100)] == [draw(number) for number in range(100)]
    assert len({str(draw(number)).partition(": ")[2] for number in range(100)}) > 95
