"""Metrics that are selected by name: what plain PyTorch computes over all samples, on any ranks and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

import paceline
import tiny
from paceline.errors import TrainError
from worlds import ranks

CLASSES, SAMPLES = 7, 19


class Values(nn.Module):
    """Returns a loss that is no metric, beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        return {"loss": (outputs - targets).pow(4).mean(), "outputs": outputs}


def classifier() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def rows() -> TensorDataset:
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 4, generator=random)
    return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=random))


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {"batch": 4}),
        (2, {"batch": 6, "accumulate": 2}),
        (2, {"batch": 6, "strategy": "fsdp"}),
        (2, {"batch": 6, "strategy": "pp"}),
        (3, {"batch": 18}),  # some ranks have no sample of the last batch
    ],
)
def test_classification_is_measured_as_in_plain_torch(world: int, settings: dict[str, Any]) -> None:
    @ranks(world)
    def body() -> None:
        names = ["accuracy", "top5_accuracy", "perplexity"]
        trainer = paceline.Trainer(
            classifier(), metrics=names, criterion=nn.CrossEntropyLoss(), run=False, quiet=True, **settings
        )
        found = trainer.evaluate(rows()).values
        inputs, targets = rows()[:]
        with torch.no_grad():
            logits = classifier()(inputs)
        wanted = {
            "accuracy": (logits.argmax(-1) == targets).float().mean().item(),
            "top5_accuracy": (logits.topk(5).indices == targets[:, None]).any(-1).float().mean().item(),
            "perplexity": functional.cross_entropy(logits, targets).exp().item(),
        }
        assert {name: found[name] for name in names} == pytest.approx(wanted, rel=1e-6)
        assert trainer.config.metrics == names

    body()


@pytest.mark.parametrize("world", [1, 2])
def test_values_are_measured_as_in_plain_torch(world: int) -> None:
    @ranks(world)
    def body() -> None:
        random = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(SAMPLES, 4, generator=random), torch.randn(SAMPLES, 3, generator=random))
        torch.manual_seed(3)
        model = Values()
        with torch.no_grad():
            outputs, targets = model.layer(data.tensors[0]), data.tensors[1]
        trainer = paceline.Trainer(model, metrics=["mse", "rmse", "mae"], batch=6, run=False, quiet=True)
        found = trainer.evaluate(data).values
        squared = functional.mse_loss(outputs, targets)
        wanted = {"mse": squared.item(), "rmse": squared.sqrt().item(), "mae": (outputs - targets).abs().mean().item()}
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)

    body()


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {"strategy": "ddp"}), (2, {"strategy": "fsdp"}), (2, {"strategy": "tp"}), (2, {"strategy": "pp"})],
)
def test_a_language_model_is_measured_by_token_without_padding(world: int, layout: dict[str, Any]) -> None:
    @ranks(world)
    def body() -> None:
        model = {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 16, "ignore_index": -100}
        recipe = {"model": model, "metrics": ["perplexity", "accuracy"], "batch": 6, "run": False, "quiet": True}
        config = paceline.Config.from_dict({**recipe, **layout})
        data = tiny.Phrases(13, 16, padded=True)
        trainer = paceline.Trainer.from_config(config)
        found, weights = trainer.evaluate(data).values, trainer.state_dict()
        if not paceline.dist.is_main():
            return
        plain = paceline.get_model("gpt")(config).eval()
        plain.load_state_dict(weights)
        batch = default_collate([data[index] for index in range(13)])
        with torch.no_grad():
            logits = plain(batch["inputs"])
        counted = batch["targets"] != -100
        mean = functional.cross_entropy(logits[counted], batch["targets"][counted])
        share = (logits.argmax(-1) == batch["targets"])[counted].float().mean().item()
        assert found["perplexity"] == pytest.approx(mean.exp().item(), rel=1e-5)
        assert found["accuracy"] == pytest.approx(share, rel=1e-6)

    body()


@ranks(2)
def test_names_and_functions_can_be_combined() -> None:
    def mine(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(-1) == targets).float()

    metrics = {"named": "accuracy", "mine": mine}
    trainer = tiny.classifier_trainer(metrics=metrics, batch=6)
    found = trainer.evaluate(tiny.blobs(SAMPLES))
    assert found["named"] == pytest.approx(found["mine"])


@pytest.mark.parametrize(
    ("metrics", "code"),
    [
        (["acuracy"], "config.bad-value"),
        (["accuracy", "accuracy"], "train.reserved-name"),
        ({"mine": "acuracy"}, "train.unknown-name"),
        ({"loss": "accuracy"}, "train.reserved-name"),
        (["no_such_module:f1"], "config.no-module"),
    ],
)
def test_an_unknown_metric_is_refused_before_training(metrics: Any, code: str) -> None:
    with pytest.raises(paceline.errors.PacelineError) as caught:
        tiny.classifier_trainer(metrics=metrics)
    assert caught.value.code == code


def test_a_model_without_suitable_outputs_is_refused() -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(metrics=["mse"], batch=6).evaluate(tiny.blobs(SAMPLES))
    assert caught.value.code == "train.metric-unfit"


@pytest.mark.parametrize(
    ("metric", "better"), [("mse", "min"), ("mae", "min"), ("perplexity", "min"), ("accuracy", "max")]
)
def test_the_best_checkpoint_is_the_one_with_the_better_value(metric: str, better: str) -> None:
    from paceline.optim.schedules import Best

    assert Best(metric).mode == better
