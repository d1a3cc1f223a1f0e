from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.errors import LayoutError
from paceline.models.gpt import GPT
from paceline.parallel.recompute import RecomputedForward, recompute
from paceline.runtime.noise import NoiseContext
from saved import Saved, formula, measure

KINDS = ("full", "every-2", "selective")


class Noisy(nn.Module):
    """Everything that a second forward could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.norm(self.linear(self.drop(inputs)))
        return functional.gelu(hidden) * scale + 0.1 * paceline.noise(hidden)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs, scale=2.0)
        return inputs.square().mean()


class Here:
    samples, start, step_samples, step = 6, 0, 6, 0


def gradients(model: nn.Module, *inputs: Any, autocast: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Of one backward, which runs outside of the forward's contexts, and the buffers after it."""
    torch.manual_seed(5)
    with NoiseContext(1, Here()), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*inputs)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert found and all(gradient.any() for gradient in found[:1])
    return found, list(model.buffers())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_dropout_and_batch_norm_have_the_same_bits(kind: str, autocast: bool) -> None:
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    plain, recomputed = Stack(), Stack()
    recompute(recomputed, kind)
    expected, found = (gradients(model, inputs, autocast=autocast) for model in (plain, recomputed))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert int(recomputed.blocks[0].norm.num_batches_tracked) == 1


def gpt(layers: int = 6, dropout: float = 0.1) -> GPT:
    torch.manual_seed(3)
    return GPT(layers=layers, width=64, heads=4, vocabulary=32, context=64, dropout=dropout)


@pytest.mark.parametrize("kind", KINDS)
def test_gpt_with_dropout_has_the_same_bits(kind: str) -> None:
    tokens = torch.randint(32, (2, 64), generator=torch.Generator().manual_seed(0))
    plain, recomputed = gpt(), gpt()
    recompute(recomputed, kind)
    expected, found = (gradients(model, tokens, tokens)[0] for model in (plain, recomputed))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_names_stay_and_a_second_call_replaces_the_first() -> None:
    model = gpt()
    names = list(model.state_dict())
    said = [recompute(model, kind) for kind in ("full", "every-2", "off")]
    assert [line.split(", ")[1] for line in said] == ["6 of 6 blocks", "3 of 6 blocks", "0 of 6 blocks"]
    assert list(model.state_dict()) == names and "forward" not in vars(model.blocks[0])
    recompute(model, "every-3")
    assert [isinstance(block.forward, RecomputedForward) for block in model.blocks] == [True, False, False] * 2


def test_a_model_without_blocks_says_how_to_name_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(LayoutError, match="blocks:") as caught:
        recompute(model, "full")
    assert caught.value.code == "layout.no-blocks"
    assert recompute(model, "full", ["0"], lambda text: None).endswith("1 of 1 blocks")


def test_nothing_is_saved_for_a_backward_without_gradients() -> None:
    model = gpt()
    recompute(model, "full")
    with torch.no_grad(), Saved() as saved:
        model(torch.zeros(1, 64, dtype=torch.long))
    assert saved.peak == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_of_saved_activations_is_what_the_formula_says(kind: str) -> None:
    model = gpt(dropout=0.0)
    tokens = torch.randint(32, (4, 64), generator=torch.Generator().manual_seed(0))
    off = measure(model, tokens)
    recompute(model, kind)
    found = measure(model, tokens)
    assert found == pytest.approx(formula(model, tokens, kind), rel=0.1)
    assert found < 0.85 * off


def sequential(depth: int = 9) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [part for _ in range(depth) for part in (nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU())]
    return nn.Sequential(*layers)


def saved_by(model: nn.Module) -> int:
    with Saved() as saved:
        model(torch.randn(64, 8)).backward()
    return saved.peak


class Two(nn.Module):
    """As an autoencoder has: blocks of one layer each, in two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = sequential(2), sequential(2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "count"), [("full", 3), ("every-2", 2)])
def test_single_layers_of_a_sequential_are_recomputed_in_groups(kind: str, count: int) -> None:
    inputs = torch.randn(6, 8)
    plain, found = Stacked(sequential()), Stacked(sequential())
    assert recompute(found, kind) == f"recompute: {kind}, {count} of 3 groups of layers"
    assert list(found.state_dict()) == list(plain.state_dict())
    for expected, gradient in zip(gradients(plain, inputs)[0], gradients(found, inputs)[0], strict=True):
        assert torch.equal(expected, gradient)
    assert saved_by(found) < saved_by(plain)
    recompute(found, "off")
    assert saved_by(found) == saved_by(plain)


class Stacked(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()  # type: ignore[no-any-return]


def test_each_sequential_has_its_own_groups() -> None:
    model = Two()
    assert recompute(model, "full") == "recompute: full, 2 of 2 groups of layers"
    assert recompute(model, "full") == "recompute: full, 2 of 2 groups of layers"
    assert saved_by(model) < saved_by(Two())


def test_blocks_that_save_nothing_are_warned_about() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    said: list[str] = []
    recompute(Layers(), "full", None, said.append)
    recompute(Two(), "full", ["encoder.0", "encoder.3"], said.append)
    assert [text.partition("]")[0] for text in said] == ["[layout.recompute-saves-nothing"] * 2
    assert "layers.0 is Linear" in said[0]
    recompute(Two(), "selective", None, said.append)
    assert "[layout.recompute-saves-nothing" in said.pop()
    recompute(Two(), "full", ["encoder", "decoder"], said.append)
    recompute(Stack(), "full", None, said.append)
    recompute(Two(), "off", ["encoder.0"], said.append)
    assert len(said) == 2
