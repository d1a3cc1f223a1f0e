"""`mlp`: a multi-layer perceptron for classification."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from paceline.models.spec import ModelSpec, PipelineSpec
from paceline.models.zoo import register_model


@register_model("mlp")
class MLP(nn.Module):
    """Flattens its input, followed by `hidden` layers of `width` units."""

    model_spec = ModelSpec(pipeline=PipelineSpec(first="flatten", blocks="layers", last="read_out", loss="loss"))

    def __init__(self, inputs: int = 3072, width: int = 128, hidden: int = 2, classes: int = 4) -> None:
        super().__init__()
        sizes = [inputs] + [width] * hidden
        layers: list[nn.Module] = []
        for size_in, size_out in pairwise(sizes):
            layers += [nn.Linear(size_in, size_out), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], classes))

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.read_out(self.layers(self.flatten(inputs)))
        return logits if targets is None else self.loss(logits, targets)

    def flatten(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)

    def read_out(self, hidden: Tensor) -> Tensor:
        return hidden  # the last layer already returns logits

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        return {"loss": functional.cross_entropy(logits, targets)}
