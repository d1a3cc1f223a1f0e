"""Blocks count their calls themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.models.dropout.scopes import by_sample
from paceline.runtime.noise import NoiseContext


@dataclass
class Rows:
    samples: int = 6
    start: int = 0
    step: int = 0
    step_samples: int = 6


class Layers(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        first = nn.Sequential(nn.Dropout(0.5))
        self.layers = nn.ModuleList([first, first if tied else nn.Sequential(nn.Dropout(0.5))])
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> list[Tensor]:
        return [self.drop(inputs), *(layer(inputs) for layer in self.layers), self.drop(inputs)]


def masks(model: nn.Module, names: list[str]) -> list[Tensor]:
    with NoiseContext(1, keys=by_sample(model, names, 1, torch.device("cpu"))) as draw:
        draw.begin(Rows())
        found: list[Tensor] = model(torch.ones(6, 20))
        draw.end()
    return found


def test_every_call_has_a_mask_of_its_own() -> None:
    for model, names in ((Layers(), ["layers.0", "layers.1"]), (Layers(tied=True), ["layers.0"])):
        found = masks(model, names)
        assert len({tuple(mask.flatten().tolist()) for mask in found}) == 4


def test_dropout_that_begins_later_has_the_masks_of_its_micro_batch() -> None:
    for model, names in ((Layers(), ["layers.0", "layers.1"]), (Layers(tied=True), ["layers.0"])):
        expected = masks(model, names)
        with NoiseContext(1, keys=by_sample(model, names, 1, torch.device("cpu"))) as draw:
            for _ in range(3):
                draw.begin(Rows(step=5))
                model.eval()(torch.ones(6, 20))
                draw.end()
            draw.begin(Rows())
            found = model.train()(torch.ones(6, 20))
            draw.end()
            between = model(torch.ones(6, 20))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert not any(torch.equal(*pair) for pair in zip(between, expected, strict=True))


def test_a_block_has_its_masks_without_the_blocks_before_it() -> None:
    model, last = Layers(), Layers()
    del last.layers[0]
    last.layers = nn.ModuleDict({"1": model.layers[1]})  # type: ignore[assignment]
    last.forward = lambda inputs: [last.layers["1"](inputs), last.drop(inputs)]  # type: ignore[method-assign,index]
    names = ["layers.0", "layers.1"]
    for full, part in zip(masks(model, names)[2:], masks(last, names), strict=True):
        assert torch.equal(full, part)


def test_the_model_is_unchanged_afterwards() -> None:
    model = Layers()
    masks(model, ["layers.0", "layers.1"])
    assert all("forward" not in layer.__dict__ for layer in model.layers)
