"""Random training programs give the result of plain PyTorch in one process, or are refused or warned about by name."""

from __future__ import annotations

import pytest

import parity
import worlds
from programs.outcome import try_program
from programs.program import Program, draw


@pytest.mark.parametrize("number", range(60))  # `make soak-programs` tries 3,000
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
