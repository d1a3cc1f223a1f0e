from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import paceline
from paceline.errors import LayoutError
from paceline.models.tensor_plan import plan_of


class Declares(nn.Module):
    model_spec = paceline.ModelSpec(blocks=("layers.*",), tensor_plan={"layers.0": "column"})

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.others = nn.ModuleList(nn.Bilinear(2, 2, 2) for _ in range(4))
        if changes:
            self.model_spec = paceline.ModelSpec(**changes)


def test_an_unknown_word_in_a_plan_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        plan_of(Declares(tensor_plan={"layers.0": "diagonal"}), None)
    assert caught.value.code == "layout.tensor-plan-word"
