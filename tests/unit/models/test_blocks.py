"""Which modules are a model's blocks."""

from __future__ import annotations

import pytest
from torch import nn

import paceline
from paceline.errors import LayoutError
from paceline.models.blocks import find_blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.left = nn.ModuleList(Layer() for _ in range(2))
        self.right = nn.ModuleList(Layer() for _ in range(2))
        self.tail = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))


def names(model: nn.Module, wanted: list[str] | None = None) -> list[str]:
    return [name for name, _ in find_blocks(model, wanted)]


def test_the_most_frequent_layer_made_of_layers_is_the_block() -> None:
    assert names(Model()) == ["left.0", "left.1", "right.0", "right.1"]


def test_bare_layers_are_the_last_resort() -> None:
    assert names(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == ["0", "2"]


def test_a_model_without_lists_has_no_blocks() -> None:
    assert names(nn.Linear(2, 2)) == []


def test_blocks_that_the_model_declares_take_precedence() -> None:
    model = Model()
    model._no_split_modules = ["Linear"]
    assert "first" in names(model)
    assert "left.0" not in names(model)


def test_named_blocks_are_taken_outermost_first_in_the_models_order() -> None:
    assert names(Model(), ["right.*", "left.0"]) == ["left.0", "right.0", "right.1"]


def test_a_name_that_matches_nothing_is_an_error_with_a_guess() -> None:
    with pytest.raises(LayoutError, match="left") as caught:
        names(Model(), ["lefty"])
    assert caught.value.code == "layout.no-such-block"


@pytest.mark.parametrize(("model", "count"), [("gpt", 4), ("resnet18", 8)])
def test_the_built_in_models_are_partitioned_by_their_blocks(model: str, count: int) -> None:
    assert len(find_blocks(paceline.get_model(model)())) == count
