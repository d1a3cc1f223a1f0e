"""Wrong uses of a layout that once trained without a word, hung or crashed; and right ones that did."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import paceline
import tiny
from paceline.errors import PacelineError
from paceline.models.gpt import GPT


class Numbers(Dataset[dict[str, Tensor]]):
    draws_randomness = False

    def __init__(self, length: int, tokens: int = 8) -> None:
        self.inputs = torch.randint(0, 32, (length, tokens), generator=torch.Generator().manual_seed(1))
        self.targets = (self.inputs * 3 + 1) % 32

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


def gpt_trainer(**changes: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = GPT(vocabulary=32, width=16, layers=4, heads=4, context=8)
    settings = {"precision": "fp64", "quiet": True, "run": False, **changes}
    return paceline.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).double().mean(-1)


def _code(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except PacelineError as error:
        return error.code
    return "trained"


def _on_two() -> dict[str, Any]:
    data, found = Numbers(24), {}
    rank = paceline.dist.rank()
    for name in ("tp", "pp"):
        sampled = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, 2, rank, shuffle=False))
        found[f"{name}, sampler over the world"] = _code(gpt_trainer(strategy=name).train, sampled, max_steps=1)
        own = data[rank * 4 : rank * 4 + 4]
        found[f"{name}, own batches"] = _code(gpt_trainer(strategy=name, batch=8).training_step, own)
        by_data_rank = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, 1, 0, shuffle=False))
        found[f"{name}, sampler over data ranks"] = gpt_trainer(strategy=name).train(by_data_rank, max_steps=2).losses
        found[f"{name}, same batch"] = float(gpt_trainer(strategy=name, batch=8).training_step(data[:8]).loss)
    found["plan without its second half"] = _code(_half_a_plan)
    found["another length in between"] = _other_length()
    found["frozen stage"] = _frozen_first_stage()
    found["zero-bubble"] = _code(_recompute_zero_bubble)
    found["in place"] = _code(_change_in_place)
    found["lists"] = _lists()
    return found


def _half_a_plan() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return (torch.tanh(self.a(inputs)).mean(-1) - targets).square().mean()

    torch.manual_seed(0)
    trainer = tiny.classifier_trainer(
        Mixes(), strategy="tp", tensor={"plan": {"a": "column"}}, criterion=None, loss_fn=None
    )
    trainer.train(tiny.blobs(), max_steps=1)


def _other_length() -> list[float]:
    trainer, losses = gpt_trainer(strategy="pp", batch=8), []
    for samples in (4, 8):
        losses.append(float(trainer.training_step(Numbers(samples)[:]).loss))
        trainer.evaluate(Numbers(8, 4))
    return losses


def _frozen_first_stage() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2))
    for layer in (model[0], model[1]):
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return tiny.classifier_trainer(model, optimizer=optimizer, strategy="pp").train(tiny.blobs(), max_steps=3).losses


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs[:, None].expand(-1, 3, -1)
        for block in self.blocks:
            after = block(hidden)
            after += hidden
            hidden = after
        return hidden.mean(1)


def _change_in_place() -> None:
    warnings.simplefilter("ignore")  # torch warns of it, of which a user sees one line among many
    tiny.classifier_trainer(InPlace(), strategy="fsdp").train(tiny.blobs(), max_steps=1)


def _recompute_zero_bubble() -> None:
    gpt_trainer(strategy="pp", pipeline={"schedule": "zero-bubble"}).enable_gradient_checkpointing()


def _lists() -> float:
    import torchmetrics

    metrics = {"ap": torchmetrics.AveragePrecision(task="multiclass", num_classes=2)}
    return tiny.classifier_trainer(metrics=metrics, strategy="pp").evaluate(tiny.blobs(7))["ap"]


@pytest.fixture(scope="module")
def on_two() -> dict[str, Any]:
    found: dict[str, Any] = paceline.launch(_on_two, ranks=2)
    return found


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_ranks_that_share_samples_must_get_the_same(layout: str, on_two: dict[str, Any]) -> None:
    assert on_two[f"{layout}, sampler over the world"] == "data.wrong-sampler"
    assert on_two[f"{layout}, own batches"] == "layout.different-batches"


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_sampler_over_data_ranks_and_the_same_batch_are_right(layout: str, on_two: dict[str, Any]) -> None:
    one = gpt_trainer(batch=8, shuffle=False).train(Numbers(24), max_steps=2).losses
    assert on_two[f"{layout}, sampler over data ranks"] == pytest.approx(one, rel=1e-9)
    assert on_two[f"{layout}, same batch"] == pytest.approx(one[0], rel=1e-9)


def test_a_plan_that_does_not_fit_the_model_is_found_before_the_first_step(on_two: dict[str, Any]) -> None:
    assert on_two["plan without its second half"] == "layout.tensor-plan-changes-loss"


def test_an_evaluation_of_another_length_leaves_training_alone(on_two: dict[str, Any]) -> None:
    trainer = gpt_trainer(batch=8)
    expected = [float(trainer.training_step(Numbers(samples)[:]).loss) for samples in (4, 8)]
    assert on_two["another length in between"] == pytest.approx(expected, rel=1e-9)


def test_a_stage_without_trainable_weights_trains_the_others(on_two: dict[str, Any]) -> None:
    losses = on_two["frozen stage"]
    assert losses[-1] < losses[0]


def test_recomputation_asked_for_later_is_refused_as_in_a_recipe(on_two: dict[str, Any]) -> None:
    assert on_two["zero-bubble"] == "layout.zero-bubble-and-recompute"


def test_a_change_in_place_that_sharding_can_not_follow_has_a_name(on_two: dict[str, Any]) -> None:
    assert on_two["in place"] == "layout.changed-in-place"


def test_a_metric_with_lists_works_where_some_ranks_see_no_samples(on_two: dict[str, Any]) -> None:
    import torchmetrics

    metrics = {"ap": torchmetrics.AveragePrecision(task="multiclass", num_classes=2)}
    assert on_two["lists"] == pytest.approx(tiny.classifier_trainer(metrics=metrics).evaluate(tiny.blobs(7))["ap"])


def _on_four() -> list[Any]:
    trainer = gpt_trainer(batch=8, layout={"pipeline": 2, "tensor": 2}, metrics={"accuracy": accuracy})
    return [trainer.evaluate(Numbers(7)).values, trainer.predict(Numbers(7))]


def test_metrics_and_predictions_of_logits_that_are_cut_over_the_vocabulary_and_stages() -> None:
    values, outputs = paceline.launch(_on_four, ranks=4)
    trainer = gpt_trainer(batch=8, metrics={"accuracy": accuracy})
    assert values == pytest.approx(trainer.evaluate(Numbers(7)).values)
    torch.testing.assert_close(outputs, trainer.predict(Numbers(7)))
