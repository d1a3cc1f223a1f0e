"""Means that are no means over samples: the same losses and weights as in a plain loop, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PacelineError, TrainError
from worlds import ranks

SAMPLES, BATCH, STEPS, CLASSES = 48, 8, 5, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, CLASSES).double()


def data() -> TensorDataset:
    """From the second batch on some targets are ignored: all of one slice, and then all of a batch but one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = x.argmax(1) % CLASSES
    y[BATCH : BATCH + 5] = -100
    y[3 * BATCH + 1 : 4 * BATCH] = -100
    return TensorDataset(x, y)


class Scored(nn.Module):
    """Computes its own loss, inside another module, like a wrapped Hugging Face model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.layer(x), y)}


class_weights = torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=torch.float64)


def masked(layer: Any, batch: Any) -> Tensor:
    losses = functional.cross_entropy(layer(batch[0]), batch[1].clamp(min=0), reduction="none")
    mask = (batch[1] >= 0).double()
    return (losses * mask).sum() / mask.sum()


def selected(layer: Any, batch: Any) -> Tensor:
    mask = batch[1] >= 0
    return ((layer(batch[0])[mask] - batch[0][mask][:, :CLASSES]) ** 2).mean()


def is_counted(batch: Any) -> Tensor:
    return batch[1] >= 0


def squares(layer: Any, batch: Any) -> Tensor:
    return ((layer(batch[0]) - batch[0][:, :CLASSES]) ** 2).mean(1)


def with_penalties(layer: Any, batch: Any) -> Tensor:
    loss = functional.cross_entropy(layer(batch[0]), batch[1])
    for _ in range(9):
        for parameter in layer.parameters():
            loss = loss + 1e-3 * parameter.square().sum()
    return loss


LossFunction = Callable[[Any, Any], Tensor]
LOSSES: dict[str, LossFunction] = {
    "cross-entropy": lambda layer, batch: functional.cross_entropy(layer(batch[0]), batch[1]),
    "class weights": lambda layer, batch: functional.cross_entropy(layer(batch[0]), batch[1], class_weights),
    "label smoothing": lambda layer, batch: functional.cross_entropy(layer(batch[0]), batch[1], label_smoothing=0.2),
    "sum / count": masked,
    "selected": selected,
    "selected by index": lambda layer, batch: (
        squares(layer, batch).index_select(0, is_counted(batch).nonzero()[:, 0]).mean()
    ),
    "nanmean": lambda layer, batch: torch.where(is_counted(batch), squares(layer, batch), torch.nan).nanmean(),
    "einsum": lambda layer, batch: (
        torch.einsum("i,i->", squares(layer, batch), is_counted(batch).double()) / is_counted(batch).sum()
    ),
    "reciprocal": lambda layer, batch: (
        (squares(layer, batch) * is_counted(batch)).sum() * (1.0 / is_counted(batch).sum())
    ),
    "deep below penalties": with_penalties,
}


def plain_loop(layer: nn.Module, loss_of: LossFunction) -> tuple[list[float], float]:
    """Losses of a plain loop over full batches, and the mean over all of the data afterwards."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    x, y = data().tensors
    losses = []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        loss = loss_of(layer, (x[rows], y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, loss_of(layer, (x, y)).item()


def trained(layer: nn.Module, **settings: Any) -> tuple[list[float], float]:
    trainer = paceline.Trainer(
        layer, torch.optim.SGD(layer.parameters(), lr=0.3), batch=BATCH, shuffle=False, precision="fp64", quiet=True,
        run=False, **settings,
    )  # fmt: skip
    losses = trainer.train(data(), max_steps=STEPS).losses
    return losses, float(trainer.evaluate(data()))


def require_equal_to_plain_loop(accumulate: int | None = None) -> None:
    more: dict[str, Any] = {} if accumulate is None else {"accumulate": accumulate}
    for name, loss_of in LOSSES.items():
        plain, reference = model(), model()
        expected, evaluated = plain_loop(reference, loss_of)
        losses, evaluation = trained(plain, loss_fn=loss_of, **more)
        assert losses == pytest.approx(expected, rel=1e-6), name
        assert evaluation == pytest.approx(evaluated, rel=1e-6), name
        for one, other in zip(plain.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-6), name
    for settings in ({"criterion": nn.CrossEntropyLoss()}, {}):
        layer = model()
        expected, evaluated = plain_loop(model(), LOSSES["cross-entropy"])
        losses, evaluation = trained(layer if settings else Scored(layer), **settings, **more)
        assert losses == pytest.approx(expected, rel=1e-6)
        assert evaluation == pytest.approx(evaluated, rel=1e-6)


@ranks(3)
def test_means_over_some_targets_are_weighted_by_them_on_ranks() -> None:
    require_equal_to_plain_loop()


def test_means_over_some_targets_are_weighted_by_them_over_micro_batches() -> None:
    require_equal_to_plain_loop(accumulate=3)


class OfTwoKinds:
    """Returns a mean, or a sum with its weight where `is_sum` says so for a call."""

    def __init__(self, is_sum: Callable[[int], bool]) -> None:
        self.is_sum, self.calls = is_sum, 0

    def __call__(self, net: nn.Module, batch: list[Tensor]) -> Any:
        self.calls += 1
        mean = functional.cross_entropy(net(batch[0]), batch[1].clamp(0))
        return paceline.Loss(mean * len(batch[0]), len(batch[0])) if self.is_sum(self.calls) else mean


def train_of_two_kinds(is_sum: Callable[[int], bool], **settings: Any) -> list[float]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_fn = OfTwoKinds(is_sum)
    settings = {"batch": BATCH, "run": False, "quiet": True, "precision": "fp64", "timeout": 30.0, **settings}
    return paceline.Trainer(net, optimizer, loss_fn=loss_fn, **settings).train(data(), max_steps=STEPS).losses


def test_losses_of_two_kinds_are_refused_within_a_step_on_one_rank() -> None:
    assert train_of_two_kinds(lambda call: call % 2 == 0) == pytest.approx(train_of_two_kinds(lambda call: True))
    with pytest.raises(TrainError, match=r"loss-changed-kind.*is paceline\.Loss\(sum, weight\).*was a mean"):
        train_of_two_kinds(lambda call: call > 5, accumulate=4)


@ranks(2)
def test_losses_of_two_kinds_are_refused_on_ranks() -> None:
    for strategy in ("ddp", "fsdp"):
        with pytest.raises(TrainError, match=r"loss-changed-kind.*is paceline\.Loss\(sum, weight\).*was a mean"):
            train_of_two_kinds(lambda call: call > 3, strategy=strategy)
    with pytest.raises(TrainError, match=r"(?s)loss-changed-kind.*rank 0: a mean.*rank 1: paceline\.Loss"):
        train_of_two_kinds(lambda call: paceline.dist.rank() == 1)


def one_rank_changes_its_kind() -> None:
    train_of_two_kinds(lambda call: paceline.dist.rank() == 1 and call > 3)


def test_a_rank_that_changes_the_kind_of_its_loss_is_the_one_that_failed() -> None:
    with pytest.raises(PacelineError, match=r"train\.loss-changed-kind"):
        paceline.launch(one_rank_changes_its_kind, ranks=2)


def scales(**settings: Any) -> list[float]:
    """The loss scale after each step: half as large after one that overflowed."""
    torch.manual_seed(0)
    net = nn.Linear(64, 16, bias=False)  # gradients of outputs overflow before those of weights: inputs are small
    x = 0.01 * torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    trainer = paceline.Trainer(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-6),
        criterion=nn.MSELoss(),
        batch=8,
        shuffle=False,
        precision="fp16",
        device="cpu",
        scaler={"initial": 2.0**19, "growth_interval": 1000},
        run=False,
        quiet=True,
        **settings,
    )
    found = []
    for step in range(1, 6):
        trainer.train(torch.utils.data.TensorDataset(x, 1000 * x[:, :16]), max_steps=step)
        found.append(trainer.scaler.get_scale())
    return found


def test_fp16_skips_the_same_steps_on_any_number_of_ranks() -> None:
    alone = paceline.launch(scales, ranks=1)
    assert alone[-1] < 2.0**19
    assert paceline.launch(scales, ranks=4) == alone
    assert paceline.launch(scales, ranks=2, strategy="fsdp") == alone
    assert paceline.launch(scales, ranks=1, accumulate=4) == alone
