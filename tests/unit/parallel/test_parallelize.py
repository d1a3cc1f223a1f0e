"""Every declared pass has a function, and the other way round. What passes may add to the parts has an effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.parallel import parallelize
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.parallel.parallelize import APPLY
from paceline.plan.passes import PASSES


def test_every_pass_is_implemented() -> None:
    assert list(APPLY) == [each.name for each in PASSES]


def test_passes_on_the_step_follow_those_on_the_model() -> None:
    targets = [each.target for each in PASSES]
    assert targets == sorted(targets)  # "model" before "step"


class Images(nn.Module):
    """Notes what its forward gets."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.convolution, self.seen = nn.Conv2d(3, 4, 3), seen

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images)
        return self.convolution(images).mean(dim=(1, 2, 3))


def train_images(model: nn.Module, **settings: Any) -> None:
    trainer = paceline.Trainer(
        model, criterion=nn.MSELoss(), strategy="single", batch=4, run=False, quiet=True, **settings
    )
    trainer.train(TensorDataset(torch.rand(8, 3, 6, 6), torch.rand(8)), max_steps=2)


def test_inputs_are_changed_by_one_pass_after_the_other() -> None:
    seen: list[Tensor] = []
    train_images(Images(seen), precision="fp64", channels_last=True)
    assert all(images.dtype is torch.float64 for images in seen)
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in seen)


def test_a_pass_can_add_contexts_of_the_forward_and_changes_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass needs that offloads activations, or slices inputs along tokens."""
    seen: list[Any] = []

    class Within:
        """May be entered again, as contexts of a forward are."""

        def __enter__(self) -> None:
            seen.append("enter")

        def __exit__(self, *error: object) -> None:
            seen.append("exit")

    def add(parts: ModelParts, context: PassContext) -> None:
        APPLY["placement"](parts, context)
        parts.forward_contexts.append(Within)
        parts.inputs.append(lambda tensor: tensor[..., :5] if tensor.dim() == 4 else tensor)

    monkeypatch.setattr(parallelize, "APPLY", {**APPLY, "placement": add})
    train_images(Images(seen), precision="bf16")
    shapes = [each.shape[-1] if isinstance(each, Tensor) else each for each in seen]
    assert shapes == ["enter", 5, "exit"] * (len(shapes) // 3) and len(shapes) >= 6
