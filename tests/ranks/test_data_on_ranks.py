"""Data on several ranks: every sample counts once, or the run is refused before its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import DataError
from paceline.testing import ranks


def code_of(data: Any, **settings: Any) -> str:
    """Train on this data, and return the code of the error that all ranks raise."""
    with pytest.raises(DataError) as caught:
        seen_in_training(data, **settings)
    return caught.value.code


class Seen(nn.Module):
    """Remembers the samples of all steps, which are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.numbers: list[int] = []

    def forward(self, numbers: Any) -> torch.Tensor:
        if self.training:
            self.numbers += [int(number) for number in numbers]
        return (self.scale * torch.stack([number.float().reshape(-1)[0] for number in numbers])).mean()


def seen_in_training(data: Any, epochs: int = 1, **settings: Any) -> list[list[int]]:
    """The samples that each rank trained on."""
    model = Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = paceline.Trainer(model, optimizer, run=False, quiet=True, preflight=False, device="cpu", **settings)
    trainer.train(data, epochs=epochs)
    return paceline.dist.all_gather_object(model.numbers)


@ranks(2)
def test_time_first_batches_are_not_sliced_along_time() -> None:
    batches = [(torch.zeros(6, 4, 1), torch.zeros(4, 1))]
    assert code_of(batches) == "data.batch-dim"


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        losses = [
            (self.scale * image.mean() - target["boxes"].sum()) ** 2
            for image, target in zip(images, targets, strict=True)
        ]
        return torch.stack(losses).mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lists_of_images_and_targets_are_sliced_by_sample(accumulate: int) -> None:
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(3, 4 + number, 5, generator=draw) for number in range(5)]
    targets = [{"boxes": torch.randn(number + 1, 4, generator=draw)} for number in range(5)]

    def losses() -> list[float]:
        model = Detector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = paceline.Trainer(model, optimizer, accumulate=accumulate, run=False, quiet=True, device="cpu")
        return trainer.train([(images, targets)], epochs=3).losses

    alone = losses()

    @ranks(2)
    def together() -> None:
        assert losses() == pytest.approx(alone, rel=1e-6)

    together()
