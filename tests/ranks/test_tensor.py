"""Layers that are cut over ranks compute what whole ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn import functional

import paceline
import tiny
from paceline.models.losses import cross_entropy
from paceline.parallel.shards import local_shard
from samples import ALL
from worlds import launch

BATCH, STEPS = 11, 5  # 50 samples: no number of ranks divides a batch, and the fifth is short
PLAN = {"plan": {"layers.0": "column", "layers.2": "row"}}


def _recipe(model: str, **changes: Any) -> dict[str, Any]:
    settings = {
        "batch": BATCH, "precision": "fp64", "clip_norm": 0.5, "ema": 0.9, "train": {"max_steps": STEPS},
    } | changes  # fmt: skip
    recipe = tiny.recipe(model, **settings)
    if "heads" in recipe["model"]:
        recipe["model"] = {**recipe["model"], "heads": 4}
    return recipe


REFERENCE = {model: _recipe(model) for model in ("mlp", "gpt", "padded-gpt", "llama")}
TENSOR, SHARD, REPLICATE = {"tensor": "auto"}, {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}
ON_TWO = {
    "mlp with a plan": _recipe("mlp", layout=TENSOR, tensor=PLAN),
    "gpt, accumulating": _recipe("gpt", layout=TENSOR, accumulate=3),
    "gpt without sequence parallel": _recipe("gpt", layout=TENSOR, tensor={"sequence": False}),
    "gpt, recomputing": _recipe("gpt", layout=TENSOR, recompute="full"),
    "padded-gpt": _recipe("padded-gpt", layout=TENSOR, accumulate=3),
    "llama": _recipe("llama", layout=TENSOR),
}
ON_FOUR = {
    "gpt on four": _recipe("gpt", layout=TENSOR),
    "padded-gpt, sharded": _recipe("padded-gpt", layout=SHARD, accumulate=3),
    "padded-gpt, replicated": _recipe("padded-gpt", layout=REPLICATE, tensor={"sequence": False}),
    "llama, replicated": _recipe("llama", layout=REPLICATE, accumulate=3),
    "llama, sharded": _recipe("llama", layout=SHARD),
    "mlp with a plan, sharded": _recipe("mlp", layout=SHARD, tensor=PLAN),
}
# Recomputed layers that are cut over ranks are in test_layouts.py too.
AT_NIGHT = {"gpt, recomputing", "gpt on four", "padded-gpt, replicated", "llama, sharded"}


def _train(recipe: dict[str, Any]) -> dict[str, Any]:
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    history = trainer.train()
    last = history.evaluations[-1]
    numbers = [*history.losses, *(step["grad_norm"] for step in history.steps), last["loss"], last["ema_loss"]]
    return {"numbers": numbers, "weights": dict(trainer.state_dict() or {})}


def _train_all(recipes: dict[str, Any], forgotten: bool = False) -> dict[str, Any]:
    if forgotten:
        from paceline.parallel.tensor import layers

        layers.copy_to_group = lambda same, group: same
    return {name: _train(recipe) for name, recipe in recipes.items()}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    results: dict[str, Any] = launch(_train_all, ranks=1, recipes=REFERENCE)
    return results


def _difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("ranks", "recipes"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.nightly)])
def test_loss_norm_average_evaluation_and_weights_are_those_of_one_rank(
    ranks: int, recipes: dict[str, Any], reference: dict[str, Any]
) -> None:
    recipes = {name: recipe for name, recipe in recipes.items() if ALL or name not in AT_NIGHT}
    for name, result in launch(_train_all, ranks=ranks, recipes=recipes).items():
        one = reference[name.split(",")[0].split()[0]]
        assert one["numbers"][0] > one["numbers"][STEPS - 1], name
        assert len(result["numbers"]) == 2 * STEPS + 2
        assert _difference(one["numbers"], result["numbers"]) < 1e-12, name
        assert set(one["weights"]) == set(result["weights"])
        for key, weight in one["weights"].items():
            torch.testing.assert_close(result["weights"][key], weight, rtol=0, atol=1e-12, msg=f"{name}: {key}")


def test_a_forgotten_sum_of_gradients_is_seen(reference: dict[str, Any]) -> None:
    recipes = {name: ON_TWO[name] for name in (["gpt, accumulating", "llama"] if ALL else ["llama"])}
    for name, broken in paceline.launch(_train_all, ranks=2, recipes=recipes, forgotten=True).items():
        one = reference[name.split(",")[0]]["numbers"]
        assert one[0] == pytest.approx(broken["numbers"][0], rel=1e-12), name
        assert _difference(one, broken["numbers"]) > 1e-5, name


def test_bf16_stays_near_one_rank() -> None:
    half = [_recipe("gpt", precision="bf16", layout=layout) for layout in (None, TENSOR)]
    one = launch(_train, ranks=1, recipe=half[0])["numbers"]
    two = launch(_train, ranks=2, recipe=half[1])["numbers"]
    assert 0.0 < _difference(one, two) < 5e-3


def _of_all_ranks(own: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(paceline.dist.world())]
    paceline.dist.all_gather(gathered, own)
    return gathered


def _look_inside_each(recipes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_look_inside(recipe) for recipe in recipes]


def _look_inside(recipe: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds of a gpt; whether the ranks agree on what is whole on each; and what its logits are."""
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    drawn = _of_all_ranks(torch.rand(1))
    trainer.train()
    model = trainer.model
    copies = [
        _of_all_ranks(local_shard(parameter))
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate()
    ]
    with torch.no_grad():
        logits = model(torch.arange(32).view(2, 16))
    return {
        "shapes": {name: list(local_shard(parameter).shape) for name, parameter in model.named_parameters()},
        "cut": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "tied": model.head.weight is model.tokens.weight,
        "agree": all(torch.equal(first, other) for first, *others in copies for other in others),
        "same draws": len({float(number) for number in drawn}) == 1,
        "logits": logits,
    }


def test_each_rank_holds_its_shard_of_sharded_weights_and_equal_replicated_ones() -> None:
    with_dropout = _recipe("gpt", layout=TENSOR)
    with_dropout["model"]["dropout"] = 0.2
    recipes = [{**with_dropout, "tensor": {"sequence": sequence}} for sequence in (True, False)]
    found = launch(_look_inside_each, ranks=2, recipes=recipes)
    for sequence, inside in zip((True, False), found, strict=True):
        shapes = inside["shapes"]
        assert shapes["tokens.weight"] == [128, 32]
        assert shapes["blocks.0.attention.qkv.weight"] == [48, 32] and shapes["blocks.0.attention.qkv.bias"] == [48]
        assert shapes["blocks.1.down.weight"] == [32, 64] and shapes["blocks.1.down.bias"] == [32]
        assert shapes["positions.weight"] == [16, 32] and shapes["norm.weight"] == [32]
        assert inside["cut"] and inside["tied"]
        assert inside["agree"], "whole weights drifted apart"
        assert inside["same draws"] is not sequence
        assert inside["logits"].shape == (2, 16, 256)  # of which each rank computes a half


def _own_model_and_optimizer(tensor: dict[str, Any] | None) -> list[torch.Tensor]:
    """As a script has them: built whole, a layer outside the plan, one bias frozen, an optimizer of its own."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2)
    )
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    layout: dict[str, Any] = {"layout": TENSOR, "tensor": tensor} if tensor else {}
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, precision="fp64", clip_norm=1.0, **layout)
    trainer.train(tiny.blobs(), epochs=2)
    return list((trainer.state_dict() or {}).values())


def test_a_users_model_and_optimizer_with_a_plan_of_the_recipe() -> None:
    one = launch(_own_model_and_optimizer, ranks=1, tensor=None)
    two = launch(_own_model_and_optimizer, ranks=2, tensor={"plan": {"2": "column", "4": "row"}})
    assert len(one) == 8
    for weight, other in zip(one, two, strict=True):
        torch.testing.assert_close(other, weight, rtol=0, atol=1e-12)


def _cut_loss(options: dict[str, Any], logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    axis = init_device_mesh("cpu", (paceline.dist.world(),))
    whole = logits.clone().requires_grad_()
    loss = cross_entropy(whole, targets, **options)
    loss.backward(torch.tensor(3.0, dtype=loss.dtype))
    own = logits.chunk(axis.size(), -1)[axis.get_local_rank()].clone().requires_grad_()
    cut = cross_entropy(DTensor.from_local(own, axis, [Shard(2)]), targets, **options)
    cut.backward(torch.tensor(3.0, dtype=loss.dtype))
    gradients = torch.cat(_of_all_ranks(own.grad), -1)
    return {"loss": loss.detach(), "cut": cut.detach(), "gradient": whole.grad, "of parts": gradients}


def _cut_losses(cases: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    return [_cut_loss(**case) for case in cases]


def test_cross_entropy_of_sharded_logits_equals_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 50 * torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    targets = torch.randint(12, (2, 5), generator=generator)
    padded = targets.clone()
    padded[0, 2:] = -1
    nothing = torch.full_like(targets, -1)
    sums = {"ignore_index": -1, "reduction": "sum"}
    cases: list[dict[str, Any]] = [
        {"options": {}, "logits": logits, "targets": targets},
        {"options": {"ignore_index": -1}, "logits": logits, "targets": padded},
        {"options": sums, "logits": logits, "targets": padded},
        {"options": sums, "logits": logits, "targets": nothing},
    ]
    for result in launch(_cut_losses, ranks=3, cases=cases):
        torch.testing.assert_close(result["cut"], result["loss"], rtol=1e-13, atol=0)
        torch.testing.assert_close(result["of parts"], result["gradient"], rtol=1e-12, atol=1e-15)
    flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(cross_entropy(logits, targets), flat, rtol=0, atol=0)


def _odd_samples(recipes: list[dict[str, Any]]) -> list[str | None]:
    codes: list[str | None] = []
    for recipe in recipes:
        try:
            _train(recipe)
            codes.append(None)
        except paceline.errors.LayoutError as error:
            codes.append(error.code)
    return codes


def test_tokens_that_do_not_divide_are_refused_and_work_without_sequence_parallel() -> None:
    recipe = _recipe("gpt", layout=TENSOR, data={"name": "tiny-text", "context": 15})
    recipes = [recipe, {**recipe, "tensor": {"sequence": False}}]
    assert launch(_odd_samples, ranks=2, recipes=recipes) == ["layout.tokens-not-divisible", None]
