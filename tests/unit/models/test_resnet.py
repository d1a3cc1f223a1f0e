from __future__ import annotations

from torch import nn

import paceline


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_resnet50_has_the_published_number_of_parameters() -> None:
    assert parameters(paceline.get_model("resnet50")(classes=1000)) == 25_557_032


def test_resnet18_has_the_published_number_of_parameters() -> None:
    assert parameters(paceline.get_model("resnet18")()) == 11_689_512
