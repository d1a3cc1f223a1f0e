"""Losses that depend on how a batch is sliced are warned about before the first step; others are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline import dist
from paceline.train.checks import split_invariance
from worlds import ranks


class Two(nn.Module):
    """A layer, dropout and batch norm: in eval mode none of them couples samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def batch(samples: int = 12, ignored: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(0, 4, (samples,), generator=generator)
    y[:ignored] = -100
    return x, y


def warnings_of(loss_fn: Callable[[Any, Any], Any], capsys: Any, model: nn.Module | None = None, **changes: Any) -> str:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"accumulate": 2, "run": False, "quiet": True, **changes}
    trainer = paceline.Trainer(model or Two(), {"name": "sgd", "lr": 0.1}, loss_fn=loss_fn, **settings)
    capsys.readouterr()
    trainer.train([batch()] * 4, max_steps=2)
    found: str = capsys.readouterr().out
    return found


def contrastive(model: Any, batch: Any) -> Tensor:
    z = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def two_means(model: Any, batch: Any) -> Tensor:
    z = model(batch[0])
    other = batch[1].roll(1).clone()
    other[6:10] = -100
    return functional.cross_entropy(z[:, :4], batch[1]) + functional.cross_entropy(z[:, 4:], other.clamp(max=3))


DEPENDENT: dict[str, Callable[[Any, Any], Any]] = {
    "contrastive": contrastive,
    "sum": lambda model, batch: model(batch[0]).pow(2).sum(),
    "sum over a constant": lambda model, batch: model(batch[0]).pow(2).sum() / 100,
    "root of a mean": lambda model, batch: model(batch[0]).pow(2).mean().sqrt(),
    "two means": two_means,
    "statistics of the batch": lambda model, batch: model(batch[0]).var(0).mean(),
    "constant weight": lambda model, batch: paceline.Loss(model(batch[0]).pow(2).mean(), 1.0),
}
INDEPENDENT: dict[str, Callable[[Any, Any], Any]] = {
    "cross-entropy": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    "label smoothing": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
    "mean of squares": lambda model, batch: model(batch[0]).pow(2).mean(),
    "near zero": lambda model, batch: (model(batch[0]) - model(batch[0])).mean(),
    "random": lambda model, batch: (model(batch[0]) - torch.randn(len(batch[0]), 8)).pow(2).mean(),
    "noise": lambda model, batch: (model(batch[0]) - paceline.noise(model(batch[0]))).pow(2).mean(),
    "with half a penalty": lambda model, batch: model(batch[0]).pow(2).mean() + model.last.weight.pow(2).sum() / 2,
    "with a penalty": lambda model, batch: model(batch[0]).pow(2).mean() + 0.1 * model.last.weight.pow(2).sum(),
    "a sum and its weight": lambda model, batch: paceline.Loss(model(batch[0]).pow(2).sum(), len(batch[0])),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_loss_that_depends_on_the_slices_is_warned_about(name: str, capsys: Any) -> None:
    assert "from its slices" in warnings_of(DEPENDENT[name], capsys)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_weighted_mean_over_samples_is_not(name: str, capsys: Any) -> None:
    assert warnings_of(INDEPENDENT[name], capsys) == ""


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_precision_is_not_mistaken_for_a_difference(precision: str, capsys: Any) -> None:
    loss_fn = INDEPENDENT["cross-entropy"]
    assert warnings_of(loss_fn, capsys, precision=precision) == ""
    assert "from its slices" in warnings_of(contrastive, capsys, precision=precision)


@pytest.mark.parametrize("masked", [slice(6, 12), slice(9, 12), slice(0, 8)], ids=["a slice", "a half", "more"])
def test_masks_that_begin_later_are_seen_wherever_they_lie(masked: slice, capsys: Any) -> None:
    """Some slices have no masked sample, and others no other ones: halves of these tell nothing."""

    def of_share(model: Any, batch: Any) -> Tensor:
        counts = (batch[1] >= 0).float()
        return (model(batch[0]).square().mean(1) * (counts / counts.sum())).sum()

    torch.manual_seed(0)
    first, later = batch(ignored=0), batch(ignored=0)
    later[1][masked] = -100
    trainer = paceline.Trainer(
        Two(), {"name": "sgd", "lr": 0.1}, loss_fn=of_share, accumulate=2, run=False, quiet=True, nonfinite="skip"
    )
    trainer.train([first, later, later, later], max_steps=4)
    assert "[train.loss-of-slices]" in capsys.readouterr().out


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("epoch", [2, 3, 4])
def test_masks_that_lie_in_one_micro_batch_of_an_epoch_are_seen(number: int, epoch: int, capsys: Any) -> None:
    """Whichever steps and micro-batches are compared, some of these epochs have their masks elsewhere."""
    torch.manual_seed(0)
    batches = [batch(ignored=0) for _ in range(epoch)]
    batches[1][1][-6 // number :] = -100  # half of its last one
    model, optimizer = nn.Linear(6, 4), {"name": "sgd", "lr": 0.01}
    trainer = paceline.Trainer(model, optimizer, loss_fn=normalized, accumulate=number, run=False, quiet=True)
    trainer.train(batches, epochs=3)
    assert "[train.loss-of-slices]" in capsys.readouterr().out


class Dropped(nn.Module):
    """In training mode, `change` is applied to the activations."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self._change = nn.Linear(6, 12), nn.Linear(12, 8), change

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self._change(functional.dropout(x, 0.1)) if self.training else x)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "fp64"}], ids=str)
def test_dropout_by_sample_is_not_warned_about(settings: Any, capsys: Any) -> None:
    model = Dropped(lambda x: functional.dropout(x.repeat_interleave(3, 0), 0.1)[::3])
    assert warnings_of(INDEPENDENT["mean of squares"], capsys, model=model, **settings) == ""


def test_samples_that_are_coupled_in_training_mode_are_warned_about(capsys: Any) -> None:
    model = Dropped(lambda x: x - x.mean(0))
    assert "In eval mode it does not" in warnings_of(INDEPENDENT["mean of squares"], capsys, model=model)


def test_dropout_of_another_dim_than_the_samples_is_warned_about(capsys: Any) -> None:
    model = Dropped(lambda x: functional.dropout(x.T, 0.5).T)  # 12 features, 6 samples
    found = warnings_of(INDEPENDENT["mean of squares"], capsys, model=model, quiet=False)
    assert "depends on the number of ranks" in found


def test_slices_of_time_are_warned_about(capsys: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNN(2, 3)  # time is the first dim

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x.unflatten(1, (3, 2)))[0]

    assert "first dim" in warnings_of(INDEPENDENT["mean of squares"], capsys, model=Recurrent())


def test_a_step_of_one_micro_batch_on_one_rank_is_not_compared(capsys: Any) -> None:
    calls = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return contrastive(model, batch)

    assert warnings_of(loss_fn, capsys, accumulate=1) == ""
    assert calls == [12, 12]


def test_halves_that_fail_are_not_judged_and_leave_no_trace(capsys: Any) -> None:
    calls = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        if not model.training and len(batch[0]) < 6:
            raise ValueError("a batch of six is needed")
        return model(batch[0]).pow(2).mean()

    assert warnings_of(loss_fn, capsys) == ""
    assert set(calls) == {6}, "what the loss function keeps is restored"


def test_a_loss_that_is_computed_in_no_mode_is_named_with_its_exception(capsys: Any) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        if len(batch[0]) < 6:
            raise ValueError("a batch of six is needed")
        return model(batch[0]).pow(2).mean()

    found = warnings_of(loss_fn, capsys)
    assert "train.not-checked" in found and "ValueError: a batch of six is needed" in found


def with_gradient_penalty(model: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    [slope] = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    return slope.pow(2).sum(1).mean()


def test_a_loss_with_gradients_in_it_is_checked(capsys: Any) -> None:
    assert (
        warnings_of(with_gradient_penalty, capsys, model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
        == ""
    )


class InTraining(nn.Module):
    """Couples samples in training mode only."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self._change = nn.Linear(6, 12), nn.Linear(12, 8), change

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self._change(x) if self.training else x)


COUPLING: dict[str, Callable[[Tensor], Tensor]] = {
    "own norm": lambda x: (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt(),
    "batch norm without statistics": lambda x: functional.batch_norm(x, None, None, training=True),
    "batch top-k": lambda x: x * (x.abs() >= x.abs().flatten().kthvalue(x.numel() // 2).values),
    "mixing": lambda x: 0.8 * x + 0.2 * x.roll(1, 0),
}


@pytest.mark.parametrize("name", COUPLING)
def test_a_model_that_couples_samples_in_training_mode_only_is_warned_about(name: str, capsys: Any) -> None:
    model = InTraining(COUPLING[name])
    assert "In eval mode it does not" in warnings_of(INDEPENDENT["mean of squares"], capsys, model=model)
    model = InTraining(COUPLING[name])
    model.last = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 8))
    assert "In eval mode it does not" in warnings_of(INDEPENDENT["mean of squares"], capsys, model=model)


TRAINED_BY_SAMPLE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "layers that are left out": lambda x: x if torch.rand(()) < 0.5 else 2 * x,
    "normalized samples": lambda x: functional.layer_norm(x, x.shape[1:]),
}


@pytest.mark.parametrize("name", TRAINED_BY_SAMPLE)
def test_a_model_that_only_draws_or_changes_samples_in_training_mode_is_not(name: str, capsys: Any) -> None:
    model = nn.Sequential(InTraining(TRAINED_BY_SAMPLE[name]), nn.BatchNorm1d(8), nn.Dropout(0.1))
    assert "from its slices" not in warnings_of(INDEPENDENT["mean of squares"], capsys, model=model)


def coupled_and_rarely_doubled(x: Tensor) -> Tensor:
    x = x - x.mean(0)
    return x if torch.rand(()) < 0.8 else 2 * x


@ranks(2)
def test_samples_that_are_coupled_are_warned_about_beside_draws_that_seldom_matter() -> None:
    """Losses of slices are not compared in training mode if they draw other numbers. Here, most of them do not."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"loss_fn": INDEPENDENT["mean of squares"], "run": False, "device": "cpu"}
    paceline.Trainer(InTraining(coupled_and_rarely_doubled), {"name": "sgd"}, **settings).train([batch()], max_steps=1)
    if dist.rank() == 0:
        draws, slices = lines
        assert draws.startswith("random numbers: rand of shape ()") and "In eval mode it does not" in slices


def ratio(model: Any, batch: Any) -> Tensor:
    p, t = model(batch[0]).sigmoid(), batch[0].abs()
    return 1 - (p[:, :6] * t).sum() / (p.sum() + t.sum())


def positive_weight(model: Any, batch: Any) -> Tensor:
    t = (batch[0] > 0.3 * batch[0][0, 0]).float()
    return functional.binary_cross_entropy_with_logits(
        model(batch[0])[:, :6], t, pos_weight=(t.numel() - t.sum()) / t.sum().clamp(min=1)
    )


def correlated(model: Any, batch: Any) -> Tensor:
    p, t = model(batch[0]).mean(1), batch[0].mean(1)
    p, t = p - p.mean(), t - t.mean()
    return 1 - (p * t).sum() / (p.norm() * t.norm() + 1e-3)


@pytest.mark.parametrize("loss_fn", [ratio, positive_weight, correlated])
def test_micro_batches_of_one_sample_are_joined(loss_fn: Any, capsys: Any) -> None:
    found = warnings_of(loss_fn, capsys, nn.Linear(6, 8), accumulate=12)
    assert "train.loss-of-slices" in found and "The loss of 2 samples" in found


@pytest.mark.parametrize("name", ["cross-entropy", "mean of squares", "noise", "a sum and its weight"])
def test_micro_batches_of_one_sample_may_be_means(name: str, capsys: Any) -> None:
    assert warnings_of(INDEPENDENT[name], capsys, nn.Linear(6, 8), accumulate=12) == ""


def errors_of(model: Any, batch: Any) -> Tensor:
    return (model(batch[0])[:, 0] - batch[0].sum(1)).square()


def normalized(model: Any, batch: Any) -> Tensor:
    mask = (batch[1] >= 0).float()
    return (errors_of(model, batch) * (mask / mask.sum())).sum()


def only_if_padded(model: Any, batch: Any) -> Tensor:
    losses, counted = errors_of(model, batch), batch[1] >= 0
    return losses.mean() if counted.all() else losses[counted].mean()


LATER: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "multi-task": (
        lambda m, b: functional.cross_entropy(m(b[0])[:, 1:], b[1]) + errors_of(m, b).mean(), "another proportion",
    ),
    "normalized weights": (normalized, "from its slices"),
    "item": (lambda m, b: (errors_of(m, b) * (b[1] >= 0)).sum() / (b[1] >= 0).float().sum().item(), "from its slices"),
    "only if padded": (only_if_padded, "that of the first one by"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_masks_that_begin_later_are_warned_about(name: str, capsys: Any) -> None:
    loss_fn, expected = LATER[name]
    settings: dict[str, Any] = {"accumulate": 2, "run": False, "quiet": True}
    trainer = paceline.Trainer(nn.Linear(6, 8), {"name": "sgd", "lr": 0.1}, loss_fn=loss_fn, **settings)
    trainer.train([batch(ignored=0), batch(ignored=2), batch(ignored=5)], epochs=1)
    assert expected in capsys.readouterr().out


def test_masks_that_begin_after_the_first_steps_are_warned_about_at_the_end(capsys: Any) -> None:
    settings: dict[str, Any] = {"accumulate": 2, "run": False, "quiet": True}
    trainer = paceline.Trainer(nn.Linear(6, 8), {"name": "sgd", "lr": 0.1}, loss_fn=normalized, **settings)
    last = batch(ignored=0)
    last[1][[1, 7]] = -100
    trainer.train([batch(ignored=0)] * 10 + [last], epochs=1)
    assert "from its slices" in capsys.readouterr().out


def test_two_means_that_ignore_different_targets_only_later_are_warned_about(capsys: Any) -> None:
    calls = []

    def spans(model: Any, batch: Any) -> Tensor:
        """As in question answering: the end of a span is outside of the context from the second step on."""
        z = model(batch[0])
        ends = batch[1].clamp(min=0)
        if model.training:
            calls.append(0)
        ends[3:] = -100 if len(calls) > 3 else 1
        starts = batch[1].clamp(min=0)
        return (functional.cross_entropy(z[:, :4], starts) + functional.cross_entropy(z[:, 4:], ends)) / 2

    assert "divided by 6, 3, in another proportion" in warnings_of(spans, capsys)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_an_output_and_a_target_that_broadcast_are_named_with_their_shapes(capsys: Any) -> None:
    found = warnings_of(lambda m, batch: functional.mse_loss(m(batch[0]), batch[1].float()), capsys, nn.Linear(6, 1))
    assert "output (6, 1) and target (6,) broadcast to (6, 6)" in found
    assert "targets.unsqueeze(-1)" in found
    assert "test_split_invariance.py" in found
    assert "paceline.Loss" not in found


def over_all_ranks(model: Any, batch: Any) -> Tensor:
    z = functional.normalize(dist.all_gather_rows(model(batch[0])), dim=1)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def gathered_without_gradients(model: Any, batch: Any) -> Tensor:
    own = model(batch[0])
    rows = list(dist.all_gather_rows(own.detach()).split(len(own)))
    rows[dist.rank()] = own  # the others are constants, so gradients are too small by the number of ranks
    z = functional.normalize(torch.cat(rows), dim=1)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def with_a_number_of_all_ranks(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    dist.all_reduce(outputs.detach().mean())  # to be logged
    loss: Tensor = outputs.pow(2).sum()
    return loss


@ranks(2)
def test_a_loss_over_the_samples_of_all_ranks_depends_on_micro_batches_only() -> None:
    said: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)

    def trained(loss_fn: Callable[[Any, Any], Any], **settings: Any) -> list[tuple[str, str]]:
        said.clear()
        torch.manual_seed(0)
        trainer = paceline.Trainer(Two(), {"name": "sgd"}, loss_fn=loss_fn, run=False, device="cpu", **settings)
        trainer.train([batch()] * 4, max_steps=2)
        return [each for each in said if "slices" in each[1]]

    whole, accumulated = trained(over_all_ranks), trained(over_all_ranks, accumulate=2)
    others = [trained(loss_fn) for loss_fn in (gathered_without_gradients, with_a_number_of_all_ranks)]
    if dist.rank() == 0:
        assert whole == [("INFO", split_invariance.GATHERS)]
        assert [level for level, _ in accumulated] == ["WARNING"]
        for found in others:
            assert [level for level, _ in found] == ["WARNING"]


def test_a_forward_that_fails_when_it_is_repeated_is_named_on_one_rank(capsys: Any) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(6, 4), 0.0

        def forward(self, x: Tensor) -> Tensor:
            total = float(x.sum())
            if total == self.seen:
                raise ValueError("these samples came before")
            self.seen = total
            return self.layer(x)

    torch.manual_seed(0)
    trainer = paceline.Trainer(Once(), {"name": "sgd"}, criterion=nn.MSELoss(), run=False, device="cpu")
    trainer.train([(torch.randn(4, 6), torch.randn(4, 4)) for _ in range(3)], max_steps=3)
    found = capsys.readouterr().out
    assert "train.not-checked" in found and "ValueError: these samples came before" in found
