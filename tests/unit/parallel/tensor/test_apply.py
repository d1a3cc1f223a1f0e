"""What is wrong with a tensor plan is known from the model's shapes, before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from paceline.config.recipe import Config
from paceline.config.sections import TensorSection
from paceline.errors import LayoutError
from paceline.models.gpt import GPT
from paceline.models.spec import plan_of
from paceline.parallel.tensor.apply import check_plan
from paceline.train import recipe_objects


def on_meta(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return GPT(layers=2, width=48, context=16, **options)


def code_of(model: nn.Module, degree: int, **settings: Any) -> str | None:
    try:
        check_plan(model, TensorSection(**settings), degree)
    except LayoutError as error:
        return error.code
    return None


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize(
    ("model", "degree", "settings", "code"),
    [
        (on_meta(heads=4), 2, {}, None),
        (on_meta(heads=4), 3, {}, "heads-not-divisible"),
        (on_meta(heads=6, vocabulary=256), 3, {}, "vocabulary-not-divisible"),
        (mlp(), 2, {}, "no-tensor-plan"),
        (mlp(), 2, {"plan": {"0": "column", "2": "row"}}, None),
        (mlp(), 3, {"plan": {"0": "column", "2": "row"}}, "layer-not-divisible"),
        (mlp(), 2, {"plan": {"0": "column", "3": "row"}}, "no-such-module"),
        (mlp(), 2, {"plan": {"1": "column"}}, "tensor-plan-kind"),
        (mlp(), 2, {"plan": {"0": "sequence"}}, "incomplete-tensor-plan"),
        (mlp(), 2, {"plan": {"0": "sequence"}, "sequence": False}, None),
        (nn.Sequential(mlp()), 2, {"plan": {"0": "sequence"}}, "tensor-plan-kind"),
        (nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), 2, {"plan": {"0": "vocabulary"}}, "tensor-plan-kind"),
        (on_meta(), 2, {"plan": {"head": "vocabulary"}}, "tied-and-cut-apart"),
        (tiny.tiny_llama(), 2, {}, None),
        (tiny.tiny_llama(), 4, {}, "heads-not-divisible"),
        (tiny.tiny_hf_gpt2(), 2, {}, "no-tensor-plan"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_has_a_code(
    model: nn.Module, degree: int, settings: Any, code: str | None
) -> None:
    assert code_of(model, degree, **settings) == (code and f"layout.{code}")


def test_the_recipes_plan_stands_before_the_models() -> None:
    assert plan_of(on_meta(), {"head": "vocabulary"}) == {"head": "vocabulary"}


def test_the_tensor_plan_of_a_hugging_face_model_is_translated() -> None:
    model = tiny.tiny_llama()
    plan = plan_of(model, None)
    assert plan["model.layers.*.self_attn.q_proj"] == "column" and plan["lm_head"] == "gathered"
    assert plan["model.layers.*.mlp.down_proj"] == "row" and plan["model.embed_tokens"] == "vocabulary"
    model._tp_plan = {"lm_head": "packed_colwise"}  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="packed_colwise"):
        plan_of(model, None)


def test_the_launcher_refuses_before_ranks_start() -> None:
    recipe = tiny.recipe("gpt", layout={"tensor": 4}, batch=8)
    with pytest.raises(LayoutError) as caught:
        recipe_objects.check(Config.from_dict(recipe), 4)
    assert caught.value.code == "layout.heads-not-divisible"
    recipe_objects.check(Config.from_dict({**recipe, "layout": {"tensor": 2, "replicate": 2}}), 4)
    recipe_objects.check(Config.from_dict(tiny.recipe("llama", layout={"tensor": 2}, batch=8)), 2)
