from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.sections import OptimizerSection as Settings
from paceline.errors import TrainError
from paceline.models.gpt import GPT
from paceline.models.mlp import MLP
from paceline.optim.optimizers import build_optimizer


def small_mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(inputs=6, width=5, hidden=2, classes=3)


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=8, heads=2, vocabulary=11, context=4)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(inputs), torch.arange(8) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def names_by(optimizer: torch.optim.Optimizer, condition: Callable[[dict[str, Any]], bool]) -> set[str]:
    return {name for group in optimizer.param_groups if condition(group) for name in group["param_names"]}


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
