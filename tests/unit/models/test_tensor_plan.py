from __future__ import annotations

import pytest
from torch import nn

import paceline
from paceline.errors import LayoutError
from paceline.models.tensor_plan import plan_of, styles_of_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def code_of(plan: dict[str, str]) -> str:
    with pytest.raises(LayoutError) as caught:
        styles_of_modules(Model(), plan_of(Model(), plan))
    return caught.value.code


def test_a_star_stands_for_one_part_of_a_name() -> None:
    plan = {"tokens": "vocabulary", "blocks.*.up": "column", "blocks.*.down": "row", "blocks.0.norm": "sequence"}
    assert styles_of_modules(Model(), plan) == {
        "tokens": "vocabulary",
        "blocks.0.up": "column",
        "blocks.1.up": "column",
        "blocks.0.down": "row",
        "blocks.1.down": "row",
        "blocks.0.norm": "sequence",
    }
    assert code_of({"*.up": "column"}) == "layout.no-such-module"
    with pytest.raises(LayoutError, match=r"did you mean 'blocks\.0\.up'"):
        styles_of_modules(Model(), {"block.0.up": "column"})


def test_names_that_a_stage_does_not_have_are_skipped() -> None:
    plan = {"tokens": "vocabulary", "head": "vocabulary"}
    assert styles_of_modules(Model(), plan, full=False) == {"tokens": "vocabulary"}
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
    model = Model()
    model.model_spec = paceline.ModelSpec(tensor_plan={"tokens": "diagonal"})  # type: ignore[assignment]
    with pytest.raises(LayoutError) as caught:
        plan_of(model, None)
    assert caught.value.code == "layout.tensor-plan-word"


def test_a_model_without_a_plan_has_a_code() -> None:
    with pytest.raises(LayoutError) as caught:
        plan_of(Model(), None)
    assert caught.value.code == "layout.no-tensor-plan"
