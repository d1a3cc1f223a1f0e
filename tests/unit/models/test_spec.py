"""What a model declares, and what is read of one that declares nothing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import paceline
from paceline.errors import LayoutError
from paceline.models.spec import ModelSpec, declared_spec, find_blocks, plan_of, spec_of, styles_of_modules


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)


class Planned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def code_of(plan: dict[str, str]) -> str:
    with pytest.raises(LayoutError) as caught:
        styles_of_modules(Planned(), plan_of(Planned(), plan))
    return caught.value.code


def test_a_star_stands_for_one_part_of_a_name() -> None:
    plan = {"tokens": "vocabulary", "blocks.*.up": "column", "blocks.*.down": "row", "blocks.0.norm": "sequence"}
    assert styles_of_modules(Planned(), plan) == {
        "tokens": "vocabulary",
        "blocks.0.up": "column",
        "blocks.1.up": "column",
        "blocks.0.down": "row",
        "blocks.1.down": "row",
        "blocks.0.norm": "sequence",
    }
    assert code_of({"*.up": "column"}) == "layout.no-such-module"
    with pytest.raises(LayoutError, match=r"did you mean 'blocks\.0\.up'"):
        styles_of_modules(Planned(), {"block.0.up": "column"})


def test_names_that_a_stage_does_not_have_are_skipped() -> None:
    plan = {"tokens": "vocabulary", "head": "vocabulary"}
    assert styles_of_modules(Planned(), plan, full=False) == {"tokens": "vocabulary"}
    assert code_of(plan) == "layout.no-such-module"


@pytest.mark.parametrize(
    "plan", [{"tokens": "column"}, {"blocks.0.norm": "row"}, {"blocks.0": "sequence"}, {"blocks.0.norm": "vocabulary"}]
)
def test_a_style_for_another_kind_of_layer_is_refused(plan: dict[str, str]) -> None:
    assert code_of(plan) == "layout.tensor-plan-kind"


def test_an_embedding_that_renormalizes_its_rows_is_refused() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 4, max_norm=1.0)})
    with pytest.raises(LayoutError) as caught:
        styles_of_modules(model, {"tokens": "vocabulary"})
    assert caught.value.code == "layout.tensor-plan-kind"


def test_an_unknown_style_is_refused_also_in_a_declared_plan() -> None:
    assert code_of({"tokens": "diagonal"}) == "layout.tensor-plan-word"
    model = Planned()
    model.model_spec = paceline.ModelSpec(tensor_plan={"tokens": "diagonal"})  # type: ignore[assignment]
    with pytest.raises(LayoutError) as caught:
        plan_of(model, None)
    assert caught.value.code == "layout.tensor-plan-word"


def test_a_model_without_a_plan_has_a_code() -> None:
    with pytest.raises(LayoutError) as caught:
        plan_of(Planned(), None)
    assert caught.value.code == "layout.no-tensor-plan"
