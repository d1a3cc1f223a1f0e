from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from paceline.config.sections import OptimizerSection as Settings
from paceline.errors import TrainError
from paceline.models.gpt import GPT
from paceline.models.mlp import MLP
from paceline.optim.optimizers import build_optimizer

NAMES = ["sgd", "adam", "adamw", "adafactor", "muon"]


def small_mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(inputs=6, width=5, hidden=2, classes=3)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(inputs), torch.arange(8) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint does it: tensors apart, everything else in JSON, where tuples become lists."""
    return {"state": copy.deepcopy(state["state"]), "param_groups": json.loads(json.dumps(state["param_groups"]))}


def names_by(optimizer: torch.optim.Optimizer, condition: Callable[[dict[str, Any]], bool]) -> set[str]:
    return {name for group in optimizer.param_groups if condition(group) for name in group["param_names"]}


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_lowers_the_loss(name: str) -> None:
    model = small_mlp()
    optimizer = build_optimizer(model, Settings(name=name), lr=0.1 if name == "sgd" else 0.01)
    losses = [one_step(model, optimizer, seed=1) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_is_on_matrices_only(name: str) -> None:
    model = small_mlp()
    optimizer = build_optimizer(model, Settings(name=name, weight_decay=0.1), lr=0.1)
    assert names_by(optimizer, lambda group: group["weight_decay"] == 0.1) == {
        "layers.0.weight", "layers.2.weight", "layers.4.weight"
    }  # fmt: skip
    assert names_by(optimizer, lambda group: group["weight_decay"] == 0.0) == {
        "layers.0.bias", "layers.2.bias", "layers.4.bias"
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_shrinks_matrices_without_a_gradient_and_leaves_biases(name: str) -> None:
    model = small_mlp()
    nn.init.ones_(model.layers[0].bias)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, Settings(name=name, weight_decay=0.5), lr=0.1).step()
    after = model.state_dict()
    assert all((after[key].norm() < before[key].norm()) == key.endswith("weight") for key in after)
    assert torch.equal(after["layers.0.bias"], before["layers.0.bias"])


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_json_and_training_continues_with_the_same_bits(name: str) -> None:
    settings = Settings(name=name, weight_decay=0.1)
    model = small_mlp()
    optimizer = build_optimizer(model, settings, lr=0.01)
    for seed in range(3):
        one_step(model, optimizer, seed)
    resumed = copy.deepcopy(model)
    other = build_optimizer(resumed, settings, lr=0.01)
    other.load_state_dict(through_json(optimizer.state_dict()))
    for seed in range(3, 6):
        one_step(model, optimizer, seed)
        one_step(resumed, other, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_state_saved_without_parameter_names_loads() -> None:
    model = small_mlp()
    optimizer = build_optimizer(model, Settings(), lr=0.01)
    one_step(model, optimizer, 0)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["param_names"]
    other = build_optimizer(model, Settings(), lr=0.01)
    other.load_state_dict(state)
    assert [group["param_names"] for group in other.param_groups] == [
        group["param_names"] for group in optimizer.param_groups
    ]
    assert len(other.state) == 6


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_set_in_the_groups_is_the_one_used(name: str) -> None:
    model = small_mlp()
    optimizer = build_optimizer(model, Settings(name=name), lr=0.01)
    optimizer.load_state_dict(optimizer.state_dict())
    before = [parameter.clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    one_step(model, optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_frozen_parameters_stay_as_they_are_and_get_no_state() -> None:
    for name in NAMES:
        model = small_mlp()
        frozen = list(model.layers[0].requires_grad_(False).parameters())
        before = [parameter.clone() for parameter in frozen]
        optimizer = build_optimizer(model, Settings(name=name, weight_decay=0.1), lr=0.1)
        one_step(model, optimizer, seed=1)
        assert all(torch.equal(now, then) for now, then in zip(frozen, before, strict=True))
        assert not any(parameter in optimizer.state for parameter in frozen)


def test_a_model_without_trainable_parameters_has_a_code() -> None:
    with pytest.raises(TrainError) as caught:
        build_optimizer(small_mlp().requires_grad_(False), Settings(), lr=0.1)
    assert caught.value.code == "train.nothing-to-train"


def test_momentum_has_each_optimizers_own_default() -> None:
    def momentum(name: str, value: float | None) -> float:
        optimizer = build_optimizer(small_mlp(), Settings(name=name, momentum=value), lr=0.1)
        return float(optimizer.param_groups[0]["momentum"])

    assert (momentum("sgd", None), momentum("muon", None)) == (0.0, 0.95)
    assert (momentum("sgd", 0.9), momentum("muon", 0.9), momentum("muon", 0.0)) == (0.9, 0.9, 0.0)


def test_a_layer_that_is_unfrozen_later_is_trained() -> None:
    model = tiny.classifier()
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear)).requires_grad_(False)
    before = layer.weight.detach().clone()

    class Unfreeze:
        def on_epoch(self, record: Any) -> None:
            assert torch.equal(layer.weight, before) or record.epoch
            layer.requires_grad_(True)

    tiny.classifier_trainer(model, callbacks=[Unfreeze()]).train(tiny.blobs(40), epochs=2)
    assert not torch.equal(layer.weight, before)


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=8, heads=2, vocabulary=11, context=4)


def muons(model: nn.Module) -> set[str]:
    return names_by(build_optimizer(model, Settings(name="muon"), lr=0.1), lambda group: "ns_steps" in group)


def test_muon_takes_the_matrices_of_blocks_and_not_a_tied_embedding() -> None:
    model = small_gpt()
    layers = ("attention.qkv", "attention.out", "up", "down")
    assert muons(model) == {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in layers}


def test_muon_does_not_take_the_output_layer() -> None:
    assert muons(small_mlp()) == {"layers.0.weight", "layers.2.weight"}
    plain_list = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])
    assert muons(nn.ModuleDict({"layers": plain_list})) == {"layers.0.weight", "layers.1.weight"}


def test_muon_does_not_take_a_layer_that_is_tied_to_an_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 9, bias=False)
            self.tokens = nn.Embedding(9, 4)
            self.tokens.weight = self.head.weight
            self.hidden = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

    assert muons(Tied()) == {"hidden.weight"}


def test_muon_is_torchs_muon_and_adamw_at_one_learning_rate() -> None:
    model, reference = small_mlp(), small_mlp()
    optimizer = build_optimizer(model, Settings(name="muon", weight_decay=0.1), lr=0.02)
    layers = reference.layers
    biases = [layers[place].bias for place in (0, 2, 4)]
    muon = torch.optim.Muon(
        [layers[0].weight, layers[2].weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [{"params": [layers[4].weight], "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}],
        lr=0.02,
        fused=True,
    )
    for seed in range(4):
        one_step(model, optimizer, seed)
        one_step(reference, muon, seed)  # its zero_grad leaves AdamW's gradients: those are cleared below
        adamw.step()
        adamw.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_muon_runs_a_closure_once() -> None:
    model = small_mlp()
    optimizer = build_optimizer(model, Settings(name="muon"), lr=0.02)
    calls = []

    def closure() -> float:
        loss = model(torch.ones(2, 6)).sum()
        loss.backward()
        calls.append(loss.item())
        return float(loss.item())

    assert [optimizer.step(closure)] == calls


def test_muon_on_a_model_without_hidden_matrices_has_a_code() -> None:
    with pytest.raises(TrainError) as caught:
        build_optimizer(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2)), Settings(name="muon"), lr=0.1)
    assert caught.value.code == "train.no-such-optimizer"
