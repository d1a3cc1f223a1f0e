"""Evaluation and prediction: every sample once, in order, on any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
import tiny
from heard import heard
from paceline.errors import DataError, TrainError
from paceline.models.losses import weighted_means
from paceline.train import metric_functions
from worlds import launch, ranks


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).float()


def expected(data: Any) -> tuple[float, float]:
    inputs, targets = data[:]
    outputs = tiny.classifier()(inputs)
    return nn.functional.cross_entropy(outputs, targets).item(), accuracy(outputs, targets).mean().item()


def f1(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    positive = outputs.argmax(-1) == 1
    return 2 * (positive & (targets == 1)).sum() / (positive.sum() + (targets == 1).sum()).clamp(min=1)


FUNCTIONS: dict[str, Any] = {
    "f1": f1,
    "f1_as_float": lambda outputs, targets: f1(outputs, targets).item(),
    "r2": lambda outputs, targets: 1 - (outputs[:, 1] - targets).var() / targets.double().var(),
    "mean": lambda outputs, targets: accuracy(outputs, targets).mean(),
    "squeezed": lambda outputs, targets: accuracy(outputs, targets).squeeze(),
    "numpy": lambda outputs, targets: accuracy(outputs, targets).numpy(),
    "loss": lambda outputs, targets: paceline.Loss(accuracy(outputs, targets).sum(), len(targets)),
    "both": lambda outputs, targets: {"f1": f1(outputs, targets), "each": accuracy(outputs, targets)},
}


def measured(layout: dict[str, Any], **settings: Any) -> dict[str, float]:
    metrics = {f"my_{name}": function for name, function in FUNCTIONS.items()}
    return (
        tiny.classifier_trainer(metrics=metrics, **{"batch": 6, **layout, **settings}).evaluate(tiny.blobs(19)).values
    )


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {"batch": 4}),
        (1, {"batch": 18}),  # the last batch has one sample
        (3, {"accumulate": 2}),
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "pp"}),
        (2, {"strategy": "ddp", "precision": "fp64"}),
    ],
)
def test_the_value_of_a_metric_does_not_depend_on_ranks_and_batches(world: int, layout: dict[str, Any]) -> None:
    @ranks(world)
    def body() -> None:
        inputs, targets = tiny.blobs(19)[:]
        outputs = tiny.classifier()(inputs)
        share, score = accuracy(outputs, targets).mean().item(), f1(outputs, targets).item()
        found = measured(layout)
        wanted = dict.fromkeys(("mean", "squeezed", "numpy", "loss", "both_each"), share)
        wanted |= dict.fromkeys(("f1", "f1_as_float", "both_f1"), score)
        wanted["r2"] = FUNCTIONS["r2"](outputs, targets).item()
        assert {name: found[f"my_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-5)

    body()


@ranks(2)
def test_the_mean_over_batches_is_recorded_with_a_warning_if_outputs_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metric_functions, "MAX_BYTES", 19 * 12)  # a row of outputs and targets takes 16 bytes
    trainer = tiny.classifier_trainer(metrics={"f1": f1}, batch=19)
    inputs, targets = tiny.blobs(19)[:]
    first, second = (f1(tiny.classifier()(inputs[part]), targets[part]).item() for part in (slice(9), slice(9, 19)))
    with heard() as said:
        for _ in range(2):
            assert trainer.evaluate(tiny.blobs(19))["f1"] == pytest.approx((9 * first + 10 * second) / 19)
    assert len(said) == paceline.dist.is_main()


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (lambda outputs, targets: (accuracy(outputs, targets).sum(), len(targets)), "train.metric-result"),
        (lambda outputs, targets: None, "train.metric-result"),
        (lambda outputs, targets: accuracy(outputs, targets) if len(targets) == 8 else 0.5, "train.metric-kinds"),
    ],
)
def test_a_result_that_could_only_be_misread_is_refused(function: Any, code: str) -> None:
    with pytest.raises(TrainError, match="'mine'") as caught:
        tiny.classifier_trainer(metrics={"mine": function}, batch=8).evaluate(tiny.blobs(13))
    assert caught.value.code == code


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp"), (2, "pp")])
def test_with_metrics_the_loss_is_computed_in_the_precision_of_training(world: int, strategy: str) -> None:
    @ranks(world)
    def body() -> None:
        seen: list[torch.dtype] = []

        def dtype(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.append(outputs.dtype)
            return accuracy(outputs, targets)

        settings: dict[str, Any] = {
            "precision": "bf16",
            "strategy": strategy,
            "batch": 24,
            "shuffle": False,
            "criterion": nn.CrossEntropyLoss(torch.tensor([0.2, 1.0])),
        }
        plain = float(tiny.classifier_trainer(**settings).evaluate(tiny.blobs(24)))
        trainer = tiny.classifier_trainer(metrics={"accuracy": dtype}, **settings)
        found = float(trainer.evaluate(tiny.blobs(24)))
        trained = trainer.train(tiny.blobs(24), max_steps=1).losses[0]
        assert found == plain == pytest.approx(trained, rel=1e-6)
        assert set(seen) <= {torch.float32}  # bfloat16 can't count beyond 256

    body()


@pytest.mark.parametrize("samples", [1, 13, 48])
@pytest.mark.parametrize("world", [1, 3])
def test_each_sample_counts_once(world: int, samples: int) -> None:
    @ranks(world)
    def body() -> None:
        data = tiny.blobs(samples)
        loss, share = expected(data)
        metrics = {
            "each": accuracy,
            "mean": lambda outputs, targets: accuracy(outputs, targets).mean(),
            "torchmetrics": torchmetrics.classification.MulticlassAccuracy(2, average="micro"),
        }
        trainer = tiny.classifier_trainer(metrics=metrics)
        for given in (data, DataLoader(data, batch_size=5), [data[:7], data[7:]] if samples > 7 else data):
            evaluation = trainer.evaluate(given)
            assert evaluation == pytest.approx(loss, rel=1e-6) and evaluation["loss"] == float(evaluation)
            for name in metrics:
                assert evaluation[name] == pytest.approx(share, rel=1e-6)

    body()


class Telling(nn.Module):
    """Returns its loss with metrics beside it, weighed by what it counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        counted = targets == 1
        losses = nn.functional.cross_entropy(self.layer(inputs), targets, reduction="none")
        count = counted.sum().clamp(min=1)
        share = (inputs[:, 0] > 0)[counted].float().sum() / count
        metrics = {"positive": share, "same": paceline.Loss((inputs[:, 0] > 0)[counted].float().sum(), counted.sum())}
        return {"loss": losses[counted].sum() / count, "weight": counted.sum(), "metrics": metrics}


@ranks(3)
def test_metrics_beside_the_loss_are_weighed_as_it_is() -> None:
    data = tiny.blobs(22)
    inputs, targets = data[:]
    share = (inputs[:, 0] > 0)[targets == 1].float().mean().item()
    torch.manual_seed(0)
    trainer = tiny.classifier_trainer(Telling(), criterion=None)
    losses = nn.functional.cross_entropy(trainer.model.layer(inputs), targets, reduction="none")
    evaluation = trainer.evaluate(data)
    assert evaluation == pytest.approx(losses[targets == 1].mean().item(), rel=1e-6)
    assert evaluation["positive"] == evaluation["same"] == pytest.approx(share, rel=1e-6)
    trainer = tiny.classifier_trainer(Telling(), criterion=None, batch=22, log_every=1)
    history = trainer.train(data, max_steps=1)
    assert history.steps[0]["positive"] == history.steps[0]["same"] == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_predictions_are_in_the_order_of_the_data(world: int) -> None:
    @ranks(world)
    def body() -> None:
        data = tiny.blobs(23)
        trainer = tiny.classifier_trainer(batch=6, accumulate=2)
        wanted = tiny.classifier()(data[:][0])
        assert torch.allclose(trainer.predict(data), wanted, atol=1e-6)
        assert torch.allclose(trainer.predict(DataLoader(data, batch_size=4)), wanted, atol=1e-6)
        assert torch.allclose(trainer.predict([data[:20], data[20:]]), wanted, atol=1e-6)

    body()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        outputs = {"double": inputs * 2 * self.scale, "sum": inputs.sum(-1, keepdim=True)}
        return outputs if targets is None else {"loss": outputs["double"].mean()}


class Dicts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.full((3,), float(index)), "targets": torch.tensor(0)}


class Tokens(nn.Module):
    """Outputs as long as the batch is padded, a row of one shape, and an item per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> Any:
        boxes = [{"boxes": row[row > 0].float()[:, None] * self.scale, "name": f"{int(row[0])}"} for row in tokens]
        return {"scaled": (tokens * self.scale, tokens == 0), "first": tokens[:, 0] * self.scale, "found": boxes}


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_outputs_whose_shapes_differ_are_lists_of_one_item_per_sample(world: int) -> None:
    @ranks(world)
    def body() -> None:
        rows = [torch.arange(1, 2 + number % 4) + number for number in range(7)]
        trainer = paceline.Trainer(Tokens(), run=False, quiet=True)
        for data in (DataLoader(rows, batch_size=3, collate_fn=padded), [padded(rows[:4]), padded(rows[4:])]):  # type: ignore[arg-type]
            outputs = trainer.predict(data)
            scaled, is_pad = outputs["scaled"]
            assert [row[~pad].tolist() for row, pad in zip(scaled, is_pad, strict=True)] == [r.tolist() for r in rows]
            assert outputs["first"].tolist() == [1, 2, 3, 4, 5, 6, 7]
            assert [found["boxes"][:, 0].tolist() for found in outputs["found"]] == [r.tolist() for r in rows]
            assert [found["name"] for found in outputs["found"]] == ["1", "2", "3", "4", "5", "6", "7"]
        # Batches that are padded before they are sliced have one padding on any number of ranks.
        assert [len(row) for row in scaled] == [4, 4, 4, 4, 3, 3, 3]

    body()


@pytest.mark.parametrize("flaw", ["flattened", "a scalar", "an object"])
def test_outputs_that_belong_to_no_sample_are_an_error_on_every_rank(flaw: str) -> None:
    @ranks(2)
    def body() -> None:
        class Odd(Tokens):
            def forward(self, tokens: torch.Tensor) -> Any:
                values = {
                    "flattened": tokens.flatten(),
                    "a scalar": tokens.sum(),
                    "an object": [object()] * len(tokens),
                }
                return tokens * self.scale, values[flaw] if 5 in tokens else tokens.sum(1)

        data = torch.arange(8).reshape(4, 2)
        with pytest.raises(TrainError, match="can't be assigned to samples") as caught:
            paceline.Trainer(Odd(), batch=4, run=False, quiet=True).predict(TensorDataset(data))
        assert caught.value.code == "train.bad-outputs"

    body()


@ranks(3)
def test_a_rank_without_samples_gets_all_of_a_tuples_tensors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return inputs * self.scale, inputs.sum(-1)

    outputs = paceline.Trainer(Two(), batch=4, run=False, quiet=True).predict([tiny.blobs(2)[:][0]])
    assert isinstance(outputs, tuple)
    assert [tuple(tensor.shape) for tensor in outputs] == [(2, 8), (2,)]


def test_inputs_alone_can_be_predicted_before_training_with_a_criterion() -> None:
    inputs = tiny.blobs(5).tensors[0]
    assert torch.allclose(
        tiny.classifier_trainer().predict(TensorDataset(inputs)), tiny.classifier()(inputs), atol=1e-6
    )


@ranks(2)
def test_outputs_may_be_dicts_and_targets_are_left_out() -> None:
    outputs = paceline.Trainer(Pair(), batch=4, run=False, quiet=True).predict(Dicts())
    assert outputs["double"][:, 0].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert outputs["sum"].flatten().tolist() == [0, 3, 6, 9, 12, 15, 18]


@ranks(3)
def test_a_batch_norm_without_memory_evaluates_on_ranks_without_samples() -> None:
    """Its statistics are those of the samples at hand, so all ranks have to come to each of them."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    trainer = tiny.classifier_trainer(model, batch=5)
    assert trainer.evaluate(tiny.blobs(12)) > 0.0


def test_evaluating_leaves_frozen_parts_and_the_mode_alone() -> None:
    trainer = tiny.classifier_trainer()
    trainer.model[0].eval()
    trainer.evaluate(tiny.blobs())
    assert trainer.model.training and not trainer.model[0].training and trainer.model[2].training


def test_an_evaluation_set_that_is_empty_has_a_code() -> None:
    with pytest.raises(DataError) as caught:
        tiny.classifier_trainer().evaluate(tiny.blobs(0))
    assert caught.value.code == "data.empty"


def test_a_metric_without_targets_has_a_code() -> None:
    trainer = tiny.classifier_trainer(
        criterion=None, loss_fn=lambda model, batch: model(batch).mean(), metrics={"accuracy": accuracy}
    )
    with pytest.raises(TrainError) as caught:
        trainer.evaluate([torch.randn(4, 8)])
    assert caught.value.code == "train.no-targets"


@ranks(2)
def test_averaged_weights_are_evaluated_beside_the_others() -> None:
    trainer = tiny.classifier_trainer(ema={"decay": 0.5, "warmup": False})
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    record = history.evaluations[-1]
    assert record["ema_loss"] > record["loss"]  # it lags behind weights that improve
    with trainer.ema_weights():
        assert trainer.evaluate(tiny.blobs()) == pytest.approx(record["ema_loss"], rel=1e-6)
    assert trainer.evaluate(tiny.blobs()) == pytest.approx(record["loss"], rel=1e-6)


def test_averaged_weights_follow_their_definition_in_float64() -> None:
    steps = []

    def follow(record: Any) -> None:
        decay = min(0.9, (1 + record.step) / (10 + record.step))
        reference.mul_(decay).add_(tiny.weights(trainer), alpha=1 - decay)
        steps.append(record.step)

    trainer = tiny.classifier_trainer(ema=0.9, precision="fp64", callbacks=[follow])
    reference = tiny.weights(trainer).clone()
    trainer.train(tiny.blobs(), epochs=4)
    with trainer.ema_weights():
        assert len(steps) == 12 and torch.allclose(tiny.weights(trainer), reference, rtol=1e-13, atol=0)


def test_averaged_weights_are_saved_and_loaded(tmp_path: Any) -> None:
    trainer = tiny.classifier_trainer(ema=0.9)
    trainer.train(tiny.blobs(), epochs=1)
    trainer.save_checkpoint(tmp_path / "c")
    again = tiny.classifier_trainer(ema=0.9)
    again.load_checkpoint(tmp_path / "c")
    with trainer.ema_weights(), again.ema_weights():
        assert torch.equal(tiny.weights(trainer), tiny.weights(again))
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer().ema_weights()
    assert caught.value.code == "train.no-ema"


def average_precision() -> dict[str, Any]:
    return {"ap": torchmetrics.AveragePrecision(task="multiclass", num_classes=2)}


@ranks(2)
def test_a_metric_with_list_states_works_where_only_the_last_stage_sees_outputs() -> None:
    inputs, targets = tiny.blobs(7)[:]
    expected = average_precision()["ap"](tiny.classifier()(inputs), targets)
    found = tiny.classifier_trainer(metrics=average_precision(), strategy="pp").evaluate(tiny.blobs(7))["ap"]
    assert found == pytest.approx(float(expected))


def token_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).double().mean(-1)


def _evaluated_and_predicted() -> list[Any]:
    layout = {"pipeline": 2, "tensor": 2}
    trainer = tiny.gpt_trainer(batch=8, layout=layout, metrics={"accuracy": token_accuracy})
    return [trainer.evaluate(tiny.Sequences(7)).values, trainer.predict(tiny.Sequences(7))]


def test_metrics_and_predictions_of_logits_that_are_split_over_the_vocabulary_and_stages() -> None:
    values, outputs = launch(_evaluated_and_predicted, ranks=4)
    trainer = tiny.gpt_trainer(batch=8, metrics={"accuracy": token_accuracy})
    assert values == pytest.approx(trainer.evaluate(tiny.Sequences(7)).values)
    torch.testing.assert_close(outputs, trainer.predict(tiny.Sequences(7)))


@ranks(2)
def test_weighted_means_join_what_each_rank_knows() -> None:
    first = paceline.dist.is_main()
    means = weighted_means(
        {"loss": [6.0, 2.0], "empty": [0.0, 0.0]} if first else {"loss": [0.0, 1.0], "own": [5.0, 2.0]}
    )
    assert (means["loss"], means["own"]) == (2.0, 2.5)
    assert math.isnan(means["empty"])
