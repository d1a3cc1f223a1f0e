from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
import tiny


class Noting(nn.Module):
    """Notes the numbers that its layer puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.seen: set[torch.dtype] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        self.seen.add(outputs.dtype)
        return outputs


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64)],
)
def test_layers_compute_in_the_requested_precision_and_weights_stay_wide(precision: str, dtype: torch.dtype) -> None:
    model = Noting()
    trainer = tiny.classifier_trainer(model, precision=precision)
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=4)
    assert model.seen == {dtype}
    assert model.layer.weight.dtype == (torch.float64 if precision == "fp64" else torch.float32)
    assert history.losses[-1] < history.losses[0]


def test_a_loss_in_half_precision_is_summed_in_float32() -> None:
    trainer = tiny.classifier_trainer(
        precision="bf16", loss_fn=lambda model, batch: (model(batch[0]).bfloat16() ** 2).mean()
    )
    loss, _ = trainer.training_step(next(iter(trainer.loader(tiny.blobs()))))
    assert loss.dtype == torch.float32


def test_an_unknown_precision_has_a_code() -> None:
    with pytest.raises(paceline.errors.ConfigError):
        tiny.classifier_trainer(precision="fp8")


def test_state_that_an_optimizer_creates_at_once_has_the_precision_of_the_weights() -> None:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.Adagrad(model.parameters())
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, precision="fp64")
    assert {state["sum"].dtype for state in trainer.optimizer.state.values()} == {torch.float64}
