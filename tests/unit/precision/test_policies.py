from __future__ import annotations

from typing import Any

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


def test_fp16_skips_steps_that_overflow_and_lowers_its_scale() -> None:
    trainer = tiny.classifier_trainer(precision="fp16", scaler={"initial": 2.0**30, "growth_interval": 100})
    before = tiny.weights(trainer)
    first = trainer.train(tiny.blobs(), max_steps=1)
    assert first.steps[0]["skipped"] and torch.equal(tiny.weights(trainer), before)
    history = trainer.train(tiny.blobs(), max_steps=30)
    skipped = [record["step"] for record in [*first.steps, *history.steps] if record.get("skipped")]
    assert skipped == list(range(1, len(skipped) + 1)) and len(skipped) < 25
    assert trainer.scaler.get_scale() == 2.0 ** (30 - len(skipped))
    assert history.losses[-1] < history.losses[0]


def test_the_scale_grows_after_its_interval() -> None:
    trainer = tiny.classifier_trainer(
        precision="fp16", scaler={"initial": 8.0, "growth": 4.0, "backoff": 0.25, "growth_interval": 5}
    )
    trainer.train(tiny.blobs(), max_steps=10)
    assert trainer.scaler.get_scale() == 8.0 * 4.0 * 4.0


def test_a_static_scale_stays_and_still_skips() -> None:
    trainer = tiny.classifier_trainer(precision="fp16", scaler={"initial": 2.0**30, "static": True})
    before = tiny.weights(trainer)
    history = trainer.train(tiny.blobs(), max_steps=4)
    assert trainer.scaler.get_scale() == 2.0**30
    assert all(record["skipped"] for record in history.steps) and torch.equal(tiny.weights(trainer), before)


def test_without_fp16_the_scale_is_one() -> None:
    assert tiny.classifier_trainer(precision="bf16").scaler.get_scale() == 1.0


def test_a_sum_over_many_tokens_does_not_overflow_the_scale() -> None:
    """The gradient of a sum is as many times larger than its mean's as there are tokens."""

    def total(model: nn.Module, batch: Any) -> paceline.Loss:
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return paceline.Loss(losses * 4096, 4096.0 * len(batch[1]))  # as if each sample had 4096 tokens

    scaler = {"initial": 2.0**14, "growth_interval": 1000}
    by_sum = tiny.classifier_trainer(precision="fp16", scaler=scaler, loss_fn=total).train(tiny.blobs(), max_steps=10)
    by_mean = tiny.classifier_trainer(precision="fp16", scaler=scaler).train(tiny.blobs(), max_steps=10)
    assert not any(record.get("skipped") for record in by_sum.steps + by_mean.steps)
    assert by_sum.losses == pytest.approx(by_mean.losses, rel=2e-3)


def test_clipping_sees_gradients_without_the_scale() -> None:
    """Clipped and plain fp16 agree where nothing is clipped."""
    plain = tiny.classifier_trainer(precision="fp16").train(tiny.blobs(), max_steps=6)
    clipped = tiny.classifier_trainer(precision="fp16", clip_norm=100.0).train(tiny.blobs(), max_steps=6)
    assert clipped.losses == pytest.approx(plain.losses, rel=1e-5)
    assert all(0.0 < record["grad_norm"] < 100.0 for record in clipped.steps)


@pytest.mark.parametrize("own", [False, True])
def test_a_skipped_first_step_leaves_fused_momentum_finite(own: bool) -> None:
    """torch's fused SGD does not write its buffers in a step that is skipped, and reads them in the next."""
    model = tiny.classifier()
    optimizer: Any = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    if own:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, precision="fp16", scaler={"initial": 2.0**26})
    history = trainer.train(tiny.blobs(), max_steps=30)
    assert history.steps[0]["skipped"] and torch.isfinite(tiny.weights(trainer)).all()
    assert history.losses[-1] < history.losses[0]
