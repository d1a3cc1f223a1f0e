"""Non-finite losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
import tiny
from paceline.errors import TrainError


def with_a_broken_sample(index: int) -> TensorDataset:
    inputs, targets = tiny.blobs().tensors
    inputs = inputs.clone()
    inputs[index, 3] = float("nan")
    return TensorDataset(inputs, targets)


class Overflowing(nn.Module):
    """Its middle layer's output is infinite for the samples with a large first value."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.root, self.after = nn.Linear(8, 4), Exponential(), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.after(self.root(self.before(inputs), inputs[:, :1]))
        return outputs


class Exponential(nn.Module):
    def forward(self, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return hidden * torch.exp(first * 1000.0).clamp(min=1.0)


def test_raise_names_the_step_the_samples_and_the_broken_one() -> None:
    trainer = tiny.classifier_trainer(log_every=4)
    with pytest.raises(TrainError) as caught:
        trainer.train(with_a_broken_sample(7), epochs=1)
    text = str(caught.value)
    assert caught.value.code == "train.nonfinite"
    order = [index for batch in trainer_batches() for index in batch]
    step = order.index(7) // 16 + 1
    assert f"step {step} " in text and "rank 0" in text and "sample 7" in text
    assert all(str(index) in text for index in trainer_batches()[step - 1][:3])


def trainer_batches() -> list[list[int]]:
    """The indices of each step of a trainer on 48 samples."""
    seen = tiny.classifier_trainer(
        criterion=None, loss_fn=lambda model, batch: model(batch[0][:, :8]).sum() * 0.0 + batch[1].float().mean()
    )
    indices = TensorDataset(tiny.blobs().tensors[0], torch.arange(48))
    return [batch[1].tolist() for batch in seen.loader(indices)]


def test_raise_names_the_first_module_and_stops_updates_before_the_log_point() -> None:
    trainer = tiny.classifier_trainer(Overflowing(), log_every=100)
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), epochs=3)
    assert "root (Exponential)" in str(caught.value)
    assert torch.isfinite(tiny.weights(trainer)).all()


def test_a_gradient_without_a_value_is_found_by_its_norm_and_named() -> None:
    """The square root's slope at zero is infinite, its value is not."""

    def root_of_zero(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) * 0.0).sqrt().mean()

    trainer = tiny.classifier_trainer(loss_fn=root_of_zero, clip_norm=1.0)
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), max_steps=2)
    assert "gradient at step 1" in str(caught.value) and "2.bias" in str(caught.value)


def test_skip_omits_nonfinite_steps_and_continues() -> None:
    broken, whole = tiny.classifier_trainer(nonfinite="skip"), tiny.classifier_trainer(nonfinite="skip")
    history = broken.train(with_a_broken_sample(7), epochs=4)
    skipped = [record["step"] for record in history.steps if record.get("skipped")]
    assert len(skipped) == 4 and len(history.steps) == 12  # one in each epoch
    assert torch.isfinite(tiny.weights(broken)).all()
    assert history.ended != "trainer.stop()" and whole.train(tiny.blobs(), epochs=1).losses[0] == history.losses[0]


def test_stop_ends_with_the_weights_before_it() -> None:
    trainer = tiny.classifier_trainer(nonfinite="stop", log_every=1)
    history = trainer.train(with_a_broken_sample(7), epochs=4)
    assert "non-finite" in str(history.ended) and len(history.steps) <= 3
    assert torch.isfinite(tiny.weights(trainer)).all()


def test_data_that_can_be_read_only_once_is_reported() -> None:
    batches = ((inputs[None].expand(4, 8) * float("inf"), torch.zeros(4).long()) for inputs, _ in tiny.blobs())
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(batch=None).train(batches, max_steps=2)
    assert "can't be read again" in str(caught.value)


def test_a_step_with_nothing_but_padding_is_not_an_error() -> None:
    from paceline import Loss

    def nothing_counts(model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).sum() * 0.0, 0.0)

    history = tiny.classifier_trainer(loss_fn=nothing_counts).train(tiny.blobs(), epochs=1)
    assert len(history.steps) == 3


def test_skipping_keeps_a_batch_norms_memory_finite() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    trainer = tiny.classifier_trainer(model, nonfinite="skip")
    trainer.train(with_a_broken_sample(7), epochs=2)
    assert torch.isfinite(model[1].running_mean).all() and trainer.evaluate(tiny.blobs()) < 5.0


def test_stop_takes_no_step_after_the_bad_one() -> None:
    """The log point comes later; the weights are those before the bad step."""
    step = next(number for number, batch in enumerate(trainer_batches(), 1) if 7 in batch)
    stopped = tiny.classifier_trainer(nonfinite="stop", log_every=100)
    stopped.train(with_a_broken_sample(7), epochs=3)
    reference = tiny.classifier_trainer(nonfinite="stop")
    if step > 1:
        reference.train(tiny.blobs(), max_steps=step - 1)
    assert torch.equal(tiny.weights(stopped), tiny.weights(reference))


def test_clipping_by_value_does_not_hide_an_infinite_gradient() -> None:
    def steep(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) * 0.0).sqrt().mean() * 1e30

    history = tiny.classifier_trainer(loss_fn=steep, clip_value=0.1, nonfinite="skip").train(tiny.blobs(), max_steps=2)
    assert all(record["skipped"] for record in history.steps)


def test_training_continues_after_the_error_was_caught() -> None:
    trainer = tiny.classifier_trainer()
    with pytest.raises(TrainError):
        trainer.train(with_a_broken_sample(7), epochs=1)
    before = tiny.weights(trainer)
    trainer.train(tiny.blobs(), max_steps=trainer.step_count + 3)
    assert not torch.equal(tiny.weights(trainer), before)


def test_a_loss_that_is_not_finite_over_finite_outputs_is_told_apart() -> None:
    def divides(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).mean() / 0.0

    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(loss_fn=divides).train(tiny.blobs(), max_steps=1)
    assert "the loss computed from them is not" in str(caught.value)


class Logarithm(Overflowing):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.log(self.after(self.before(inputs)) * 0.0)


@pytest.mark.parametrize(
    ("model", "lr", "expected"),
    [(Logarithm(), 0.1, "fix: keep the arguments of log"), (nn.Linear(8, 2), 1e30, "fix: lower the learning rate")],
    ids=["log of zero", "learning rate"],
)
def test_the_fix_belongs_to_the_cause(model: nn.Module, lr: float, expected: str) -> None:
    trainer = paceline.Trainer(
        model, {"name": "sgd", "lr": lr}, criterion=nn.MSELoss(), batch=16, run=False, quiet=True
    )
    with pytest.raises(TrainError) as caught:
        trainer.train(TensorDataset(torch.ones(48, 8), torch.zeros(48, 2)), epochs=4)
    assert expected in str(caught.value)
