"""What a mean loss was divided by, with and without gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.divisor import LossGraph, divisor_of, weighted_mean

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 5, generator=GENERATOR)
OTHER = torch.randn(6, 5, generator=GENERATOR)
TARGETS = torch.tensor([0, 1, -100, 3, 4, 2])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
MASK = torch.tensor([True, False, True, True, False, True])
COLUMN = MASK[:, None]
cross_entropy = functional.cross_entropy

CASES: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "cross-entropy": (lambda x: cross_entropy(x, TARGETS), 5),
    "class weights": (lambda x: cross_entropy(x, TARGETS, WEIGHTS), 15),
    "label smoothing": (lambda x: cross_entropy(x, TARGETS, WEIGHTS, label_smoothing=0.1), 15),
    "pixels": (lambda x: cross_entropy(x.T[None], TARGETS[None]), 5),
    "half precision": (lambda x: cross_entropy(x.bfloat16(), TARGETS), 5),
    "cast and scaled": (lambda x: cross_entropy(x, TARGETS).to(torch.bfloat16).float() * 0.5, 5),
    "with a penalty": (lambda x: functional.nll_loss(x.log_softmax(-1), TARGETS) + 0.1 * x.pow(2).sum(), 5),
    "stacked": (lambda x: torch.stack([cross_entropy(x, TARGETS), cross_entropy(x, TARGETS)]).mean(), 5),
    "sum / count": (lambda x: (x * COLUMN).sum() / MASK.sum(), 4),
    "sum / clamped count": (lambda x: (x * COLUMN).sum() / MASK.float().sum().clamp(min=1), 4),
    "mean / share": (lambda x: (x * COLUMN).mean() / MASK.float().mean(), 20),
    "selected rows": (lambda x: x[MASK].mean(), 20),
    "selected, squared": (lambda x: ((x - OTHER)[MASK] ** 2).mean(), 20),
    "selected, in a loss": (lambda x: functional.mse_loss(x[MASK], OTHER[MASK]), 20),
    "index_select": (lambda x: x.index_select(0, MASK.nonzero()[:, 0]).mean(), 20),
    "nanmean": (lambda x: torch.where(COLUMN, x, torch.nan).nanmean(), 20),
    "einsum / count": (lambda x: torch.einsum("i,i->", x[:, 0], MASK.float()) / MASK.sum(), 4),
    "sum * reciprocal": (lambda x: (x * COLUMN).sum() * (1.0 / MASK.sum()), 4),
    "below many terms": (lambda x: sum((0 * x.sum() for _ in range(30)), cross_entropy(x, TARGETS)), 5),
    "masked_select": (lambda x: torch.masked_select(x, COLUMN).mean(), 20),
    "mean": (lambda x: functional.mse_loss(x, OTHER), None),
    "scaled mean": (lambda x: x.mean() / 2, None),
    "sum": (lambda x: cross_entropy(x, TARGETS, reduction="sum"), None),
    "sum / constant": (lambda x: x.sum() / 7.0, None),
    "ratio of outputs": (lambda x: 1 - 2 * (x * OTHER).sum() / (x.sum() + OTHER.sum()), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_divisor_is_that_of_the_mean_with_and_without_gradients(name: str) -> None:
    loss, expected = CASES[name]
    mean = loss(X.clone().requires_grad_())
    divisor = divisor_of(mean)
    assert (None if divisor is None else float(divisor)) == expected
    with torch.no_grad(), LossGraph(torch.nn.Module()):
        evaluated = loss(X.clone().requires_grad_())
    assert torch.equal(evaluated.detach(), mean.detach())
    _, weight = weighted_mean(evaluated, 6, divides=None)
    assert float(weight) == (6 if expected is None else expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: cross_entropy(x, torch.full((6,), -100)),
        lambda x: cross_entropy(x, torch.zeros(6, dtype=torch.long), torch.tensor([0.0, 1, 1, 1, 1])),
        lambda x: (x * 0.0).sum() / torch.zeros(6).sum(),
        lambda x: (x * 0.0).sum() * (1.0 / torch.zeros(6).sum()),
    ],
    ids=["all ignored", "only classes of weight zero", "empty mask", "reciprocal of an empty mask"],
)
def test_a_mean_over_nothing_has_no_gradient_at_weight_zero(loss: Callable[[Tensor], Tensor]) -> None:
    x = X.clone().requires_grad_()
    mean = loss(x)
    assert weighted_mean(mean, 6, divides=True) == (0, 0)
    mean.backward(torch.zeros(()))
    assert x.grad is not None and not x.grad.any()


def test_only_the_graph_of_the_loss_is_recorded() -> None:
    layer = torch.nn.Linear(5, 5)
    with torch.no_grad(), LossGraph(torch.nn.Module()):
        outputs = layer(X).relu()
        loss = cross_entropy(outputs, TARGETS)
    assert outputs.grad_fn is None and loss.grad_fn is not None


class Tracked(torch.nn.Module):
    """Updates a statistic without gradients, after a mean that may be taken for that of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.lerp_(inputs.abs().mean(), 0.1)
        return inputs / self.scale


def test_what_is_written_into_buffers_is_not_recorded() -> None:
    model = Tracked()
    with torch.no_grad(), LossGraph(model):
        loss = cross_entropy(model(X), TARGETS)
    assert model.scale.grad_fn is None and not model.scale.requires_grad
    assert divisor_of(loss) == (TARGETS >= 0).sum()
