"""Shapes that broadcast to more elements than the output and the target have are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.models.broadcasts import Broadcasts


def found_in(loss: Any, output: tuple[int, ...], target: tuple[int, ...]) -> str | None:
    with Broadcasts(loss) as mode:
        loss(torch.zeros(output), torch.ones(target))
    return mode.found


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss()], ids=repr)
def test_a_column_and_a_vector(loss: nn.Module) -> None:
    found = found_in(loss, (8, 1), (8,))
    assert found is not None
    assert f"output (8, 1) and target (8,) broadcast to (8, 8) in {type(loss).__name__}" in found
    assert "targets.unsqueeze(-1)" in found
    assert "test_broadcasts.py" in found


def test_other_shapes_get_no_advice_about_squeezing() -> None:
    found = found_in(functional.mse_loss, (8,), (8, 1))
    assert found is not None
    assert "mse_loss" in found
    assert "make their shapes equal" in found


@pytest.mark.parametrize(
    ("output", "target"), [((8, 1), (8, 1)), ((8, 3), (1,)), ((8, 3), (8, 1)), ((8,), ())], ids=str
)
def test_a_target_that_is_repeated_is_not_reported(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    assert found_in(functional.l1_loss, output, target) is None
