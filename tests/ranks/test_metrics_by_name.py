"""Metrics that are selected by name: what plain PyTorch computes over all samples, on any ranks and layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

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


class Sequences(Dataset[Any]):
    """As many classes as the longest sequence has tokens, one of which is in the last batch."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(CLASSES, (self.lengths[index],), generator=torch.Generator().manual_seed(index))
        return tokens, tokens


class OwnLanguageModel(nn.Module):
    def __init__(self, **spec: Any) -> None:
        super().__init__()
        self.model_spec = paceline.ModelSpec(**spec)
        self.logits = nn.Embedding(CLASSES, CLASSES)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.logits(tokens)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("world", [1, 2])
def test_a_length_equal_to_the_number_of_classes_is_clear_or_refused_before_the_first_step(world: int) -> None:
    @ranks(world)
    def body() -> None:
        def train(val: Sequences, **spec: Any) -> Any:
            settings: dict[str, Any] = {"metrics": ["accuracy"], "batch": 4, "run": False, "quiet": True}
            torch.manual_seed(0)
            trainer = paceline.Trainer(OwnLanguageModel(**spec), **settings)
            try:
                return trainer.train(Sequences(*[5] * 8), val, epochs=1).evaluations[-1]["accuracy"]
            except TrainError as error:
                assert "class_dim=-1" in str(error)
                return error.code, trainer.step_count

        late, early = Sequences(*[5] * 4, *[CLASSES] * 4), Sequences(*[CLASSES] * 4)
        assert train(late) == train(late, class_dim=-1)
        assert isinstance(train(early, class_dim=-1), float)
        assert train(early) == ("train.metric-unfit", 0)

    body()


@pytest.mark.parametrize("layout", [{"strategy": "fsdp"}, {"strategy": "tp"}, {"strategy": "pp"}])
def test_the_vocabulary_of_a_gpt_may_be_as_large_as_its_context(layout: dict[str, Any]) -> None:
    @ranks(2)
    def body() -> None:
        model = {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 32, "vocabulary": 32}
        recipe = {"model": model, "metrics": ["perplexity"], "batch": 6, "run": False, "quiet": True, **layout}
        trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
        found = trainer.evaluate(tiny.Sequences(13, 32))
        assert found["perplexity"] == pytest.approx(math.exp(found), rel=1e-5)

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
