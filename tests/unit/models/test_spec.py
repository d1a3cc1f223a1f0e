"""What a model declares, and what is read of one that declares nothing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import paceline
from paceline.errors import LayoutError
from paceline.models.blocks import find_blocks
from paceline.models.spec import ModelSpec, declared_spec, spec_of
from paceline.models.tensor_plan import plan_of


class Declares(nn.Module):
    model_spec = paceline.ModelSpec(blocks=("layers.*",), tensor_plan={"layers.0": "column"})

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.others = nn.ModuleList(nn.Bilinear(2, 2, 2) for _ in range(4))
        if changes:
            self.model_spec = paceline.ModelSpec(**changes)


def test_what_a_model_declares_is_used() -> None:
    assert spec_of(Declares()) is Declares.model_spec
    assert [name for name, _ in find_blocks(Declares())] == ["layers.0", "layers.1"]
    assert plan_of(Declares(), None) == {"layers.0": "column"}


def test_an_instance_may_declare_another_spec() -> None:
    model = Declares(heads={"heads": 3})
    assert spec_of(model).heads == {"heads": 3}
    assert [name for name, _ in find_blocks(model)] == [f"others.{number}" for number in range(4)]


def test_the_recipe_takes_precedence() -> None:
    assert [name for name, _ in find_blocks(Declares(), ["others.1"])] == ["others.1"]
    assert plan_of(Declares(), {"layers.0": "row"}) == {"layers.0": "row"}


def test_a_declared_block_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        find_blocks(Declares(blocks=("stages.*",)))
    assert caught.value.code == "layout.no-such-block"


def test_a_model_without_declaration_has_an_empty_spec() -> None:
    model = nn.Linear(2, 2)
    assert declared_spec(model) is None
    assert spec_of(model) == ModelSpec()


def test_an_attribute_of_that_name_that_is_not_a_spec_is_ignored() -> None:
    model = nn.Linear(2, 2)
    model.model_spec = "v2"  # type: ignore[assignment]
    assert spec_of(model) == ModelSpec()
