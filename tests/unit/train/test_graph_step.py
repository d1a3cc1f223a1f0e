from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
import tiny
from graph_on_cpu import GraphsOnCpu
from paceline.errors import LayoutError, TrainError
from paceline.train import cuda_graphs
from paceline.train.features.nonfinite import NonfiniteGuard
from worlds import ranks


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[GraphsOnCpu]]:
    monkeypatch.setattr(cuda_graphs, "CudaGraphs", GraphsOnCpu)
    for reads in ("check_losses", "check_norm"):  # on a CPU the guard reads values; on a GPU it is captured
        monkeypatch.setattr(NonfiniteGuard, reads, lambda *args: None)
    return GraphsOnCpu


def halved(every: int) -> dict[str, Any]:
    """Learning rates that float32 represents."""
    return {"name": "step", "every": every, "factor": 0.5}


def squared(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny.classifier()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[0](inputs)
        return self.layers[2](torch.relu(hidden) + 0.1 * paceline.noise(hidden))


def with_layer(layer: nn.Module) -> nn.Module:
    model = tiny.classifier()
    return nn.Sequential(model[0], layer, model[2])


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, last = model[0], model[2]  # type: ignore[index]
    first.bias.requires_grad_(False)
    groups = [{"params": list(first.parameters())}, {"params": list(last.parameters()), "lr": 2.0**-6}]
    return torch.optim.AdamW(groups, lr=2.0**-7, fused=True)


def trained(graph: bool, samples: int = 48, epochs: int = 4, **settings: Any) -> tuple[paceline.Trainer, list[float]]:
    make, optimize = settings.pop("model", tiny.classifier), settings.pop("optimize", None)
    model = make()
    if optimize is not None:
        settings["optimizer"] = optimizer = optimize(model)
        if "schedules" in settings:
            settings["scheduler"] = settings.pop("schedules")(optimizer)
    trainer = tiny.classifier_trainer(model, graph=graph, **settings)
    return trainer, trainer.train(tiny.blobs(samples), epochs=epochs).losses


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}},
    "clip": {"clip_norm": 0.1, "clip_value": 0.05},
    "ema": {"ema": 0.99},
    "ema-without-warmup": {"ema": {"decay": 0.9, "warmup": False}},
    "schedule": {"schedule": halved(every=3), "optimizer": {"name": "adamw", "lr": 2.0**-7}},
    "accumulate": {"accumulate": 2, "loss_fn": squared},
    "dropout": {"model": lambda: with_layer(nn.Dropout(0.3))},
    "dropout-accumulate": {"model": lambda: with_layer(nn.Dropout(0.3)), "accumulate": 2, "loss_fn": squared},
    "dropout-of-torch": {"model": lambda: with_layer(nn.Dropout(0.3)), "dropout": "per-rank"},
    "batch-norm": {"model": lambda: with_layer(nn.BatchNorm1d(16))},
    "noise": {"model": Noisy, "accumulate": 2, "loss_fn": squared},
    "loss-scale": {"precision": "fp16", "scaler": {"growth_interval": 2, "initial": 64.0}, "clip_norm": 0.5},
    "groups": {"optimize": two_groups},
    "scheduler": {
        "optimize": two_groups,
        "schedules": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        "scheduler_interval": "step",
    },
}


@pytest.mark.parametrize("case", SETTINGS)
def test_replayed_steps_give_the_bits_of_eager_ones(captured: type[GraphsOnCpu], case: str) -> None:
    settings = SETTINGS[case]
    eager, expected = trained(False, **settings)
    graphed, losses = trained(True, **settings)
    assert losses == expected and (captured.captures, captured.replays) == (1, 9)
    pairs = zip(graphed.model.state_dict().values(), eager.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    if "ema" in settings:
        with graphed.ema_weights(), eager.ema_weights():
            assert torch.equal(tiny.weights(graphed), tiny.weights(eager))


def test_a_learning_rate_that_float32_rounds_changes_the_last_bits_at_most(captured: type[GraphsOnCpu]) -> None:
    schedule = {"schedule": {"name": "cosine", "warmup": 3, "steps": 40}}
    losses, expected = (trained(graph, **schedule)[1] for graph in (True, False))
    assert losses == pytest.approx(expected, rel=1e-6)


def test_short_batches_run_eagerly_until_they_have_come_back(captured: type[GraphsOnCpu]) -> None:
    losses, expected = (trained(graph, samples=40, epochs=5)[1] for graph in (True, False))
    assert losses == expected
    # Full batches: 3 eager ones of 10. The last of an epoch: 3 of 5.
    assert (captured.captures, captured.replays, captured.warm_ups) == (2, 9, 6)


def test_many_shapes_are_reported(captured: type[GraphsOnCpu], capsys: pytest.CaptureFixture[str]) -> None:
    batches = [tiny.blobs(1 + step % 12)[:] for step in range(84)]
    trainer = tiny.classifier_trainer(graph=True, quiet=False, loss_fn=squared, batch=None)
    trainer.train(batches, max_steps=84)
    said = "".join(capsys.readouterr())
    assert "steps ran eagerly, because batches have many shapes (12 so far" in said
    assert captured.captures == 4


def test_a_shape_without_a_graph_gets_one_when_others_are_released(captured: type[GraphsOnCpu]) -> None:
    def run(graph: bool) -> list[float]:
        callback = AtStep(25, slower)
        batches = [tiny.blobs(1 + step % 5)[:] for step in range(40)]
        callback.trainer = tiny.classifier_trainer(
            with_layer(nn.Dropout(0.2)), graph=graph, loss_fn=squared, batch=None, callbacks=[callback]
        )
        return callback.trainer.train(batches, max_steps=40).losses

    losses = run(True)
    assert captured.captures == 8
    assert losses == run(False)


class AtStep:
    def __init__(self, step: int, change: Any) -> None:
        self.step, self.change = step, change

    def on_step(self, record: Any) -> None:
        if record.step == self.step:
            self.change(self.trainer)

    trainer: paceline.Trainer


def slower(trainer: paceline.Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 0.003


def decay(trainer: paceline.Trainer) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5


def freeze(trainer: paceline.Trainer) -> None:
    next(trainer.model.parameters()).requires_grad_(False)


def thaw(trainer: paceline.Trainer) -> None:
    next(trainer.model.parameters()).requires_grad_(True)


def replace_weights(trainer: paceline.Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data * 0.5


def drop_more(trainer: paceline.Trainer) -> None:
    trainer.model[1].p = 0.8


def zero(trainer: paceline.Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).zero_()


@pytest.mark.parametrize(
    ("change", "captures"),
    [(slower, 2), (decay, 2), (freeze, 2), (thaw, 2), (replace_weights, 2), (drop_more, 2), (zero, 1)],
)
def test_what_a_callback_changes_has_an_effect(captured: type[GraphsOnCpu], change: Any, captures: int) -> None:
    def train(graph: bool) -> tuple[list[float], Tensor]:
        callback = AtStep(5, change)
        model = with_layer(nn.Dropout(0.2))
        next(model.parameters()).requires_grad_(change is not thaw)
        callback.trainer = tiny.classifier_trainer(model, graph=graph, callbacks=[callback])
        return callback.trainer.train(tiny.blobs(), epochs=4).losses, tiny.weights(callback.trainer)

    losses, weights = train(True)
    assert captured.captures == captures
    expected, expected_weights = train(False)
    assert losses == expected and torch.equal(weights, expected_weights)


class Scaled(nn.Module):
    """Multiplies by numbers that a dict and an object hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.table, self.config = tiny.classifier(), {"scale": 1.0}, SimpleNamespace(scale=1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs) * self.table["scale"] * self.config.scale


class WeightedLoss:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * nn.functional.cross_entropy(outputs, targets)

    def of_batch(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model(batch[0]), batch[1])


def set_scale(holder: str) -> Any:
    def change(model: Any, loss: Any) -> None:
        if holder == "table":
            model.table["scale"] = 3.0
        else:
            model.config.scale = 3.0

    return change


@pytest.mark.parametrize(
    ("make_loss", "setting", "change"),
    [
        (WeightedLoss, "criterion", lambda model, loss: setattr(loss, "weight", 0.25)),
        (WeightedLoss, "loss_fn", lambda model, loss: setattr(loss, "weight", 0.25)),
        (nn.CrossEntropyLoss, "criterion", lambda model, loss: setattr(loss, "label_smoothing", 0.5)),
        (nn.CrossEntropyLoss, "criterion", set_scale("table")),
        (nn.CrossEntropyLoss, "criterion", set_scale("config")),
    ],
    ids=["criterion", "owner-of-loss_fn", "module-as-criterion", "dict", "object"],
)
def test_numbers_of_the_loss_and_of_what_modules_hold_are_followed(
    captured: type[GraphsOnCpu], make_loss: Any, setting: str, change: Any
) -> None:
    def train(graph: bool) -> list[float]:
        loss, model = make_loss(), Scaled()
        callback = AtStep(5, lambda trainer: change(model, loss))
        given = {"criterion": loss, "loss_fn": None} if setting == "criterion" else {"loss_fn": loss.of_batch}
        callback.trainer = tiny.classifier_trainer(model, graph=graph, callbacks=[callback], **given)
        return callback.trainer.train(tiny.blobs(), epochs=4).losses

    losses = train(True)
    assert captured.captures == 2
    assert losses == train(False)


def test_a_forward_that_counts_is_not_captured_again_after_eager_steps(captured: type[GraphsOnCpu]) -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return inputs

    trained(True, samples=40, epochs=5, model=lambda: with_layer(Counts()), callbacks=[lambda record: None])
    assert (captured.captures, captured.replays, captured.warm_ups) == (2, 9, 6)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.0**-5, total_steps=80)


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 2.0**-6, 2.0**-3, step_size_up=8)


@pytest.mark.parametrize(("kind", "schedules"), [("AdamW", one_cycle), ("SGD", one_cycle), ("SGD", cyclic)])
def test_schedulers_that_change_momentum_have_an_effect_and_are_reported(
    captured: type[GraphsOnCpu], kind: str, schedules: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"momentum": 0.9} if kind == "SGD" else {}
    settings: dict[str, Any] = {
        "optimize": lambda model: getattr(torch.optim, kind)(model.parameters(), lr=2.0**-7, fused=True, **more),
        "schedules": schedules, "scheduler_interval": "step", "epochs": 18, "quiet": False,
    }  # fmt: skip
    losses, expected = (trained(graph, **settings)[1] for graph in (True, False))
    assert losses == pytest.approx(expected, rel=1e-4)
    said = "".join(capsys.readouterr())
    name = "momentum" if kind == "SGD" else "betas"
    assert captured.captures == 0 and f"steps ran eagerly, because {name} changed again and again" in said
    assert "cycle_momentum=False" in said


class Remark:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("kind", [np.float32, Remark])
def test_batches_with_values_that_can_not_be_compared_run_eagerly(
    captured: type[GraphsOnCpu], kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs, factor = batch
        return model(inputs).square().mean() * float(getattr(factor, "number", factor))

    def train(graph: bool) -> list[float]:
        batches = ((tiny.blobs(8)[:][0], kind(1 + step % 7)) for step in range(60))
        trainer = tiny.classifier_trainer(graph=graph, loss_fn=loss_fn, batch=None, quiet=False)
        return trainer.train(batches, max_steps=60).losses

    losses = train(True)
    assert captured.captures == 0
    assert f"steps ran eagerly, because batches contain {kind.__name__}" in "".join(capsys.readouterr())
    assert losses == train(False)


def test_noise_that_a_recomputed_block_changes_in_place(captured: type[GraphsOnCpu]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden) * (1 + paceline.noise(hidden).mul_(0.5))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.blocks = nn.Linear(8, 16), nn.ModuleList([Block(), Block()])

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    losses, expected = (trained(graph, model=Blocks, recompute="full")[1] for graph in (True, False))
    assert losses == expected and captured.replays


def test_learning_rates_that_change_all_the_time_are_read_from_the_device(captured: type[GraphsOnCpu]) -> None:
    def train(graph: bool) -> list[float]:
        trainer: list[paceline.Trainer] = []

        def change(record: Any) -> None:
            trainer[0].optimizer.param_groups[0]["lr"] = 2.0 ** -(7 + record.step % 5)

        trainer.append(tiny.classifier_trainer(graph=graph, callbacks=[change]))
        return trainer[0].train(tiny.blobs(), epochs=8).losses

    losses = train(True)
    assert 8 < captured.captures <= 10 and captured.replays == 21
    assert losses == train(False)


def test_a_run_resumes_between_replayed_steps(captured: type[GraphsOnCpu], tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "ema": 0.99, "schedule": {"name": "cosine", "steps": 30}, "eval_every": 2, "save_every": 7, "run": None,
    }  # fmt: skip

    def build(run: str) -> paceline.Trainer:
        return tiny.classifier_trainer(
            with_layer(nn.Dropout(0.3)), graph=True, **{**settings, "run": str(tmp_path / run)}
        )

    whole, first = build("whole"), build("parts")
    expected = whole.train(tiny.blobs(), tiny.blobs(20, first=1), max_steps=15)
    first.train(tiny.blobs(), tiny.blobs(20, first=1), max_steps=9)
    second = tiny.classifier_trainer(with_layer(nn.Dropout(0.3)), graph=True, **{**settings, "run": False})
    second.load_checkpoint(tmp_path / "parts" / "checkpoints" / "step-000007")
    history = second.train(tiny.blobs(), tiny.blobs(20, first=1), max_steps=15)
    assert captured.replays == 5  # the resumed run warms up first
    assert history.losses == expected.losses[7:]
    assert torch.equal(tiny.weights(second), tiny.weights(whole))


def test_train_may_be_called_again(captured: type[GraphsOnCpu]) -> None:
    trainer, expected = trained(False, epochs=6)[0], trained(False, epochs=6)[1]
    trainer = tiny.classifier_trainer(graph=True)
    losses = [loss for epochs in (3, 6) for loss in trainer.train(tiny.blobs(), epochs=epochs).losses]
    assert losses == expected and captured.captures == 2


class Reads(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum().item() > 0 else inputs * 2


def test_an_operation_that_reads_a_value_is_named_with_its_module(captured: type[GraphsOnCpu]) -> None:
    with pytest.raises(TrainError) as caught:
        trained(True, model=lambda: with_layer(Reads()))
    assert caught.value.code == "train.graph-capture"
    assert "aten._local_scalar_dense.default in 1 (Reads)" in caught.value.what


def test_metrics_of_a_replayed_step_are_its_own(captured: type[GraphsOnCpu]) -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tiny.classifier()

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
            outputs = self.layers(inputs)
            size = paceline.Loss(outputs.detach().abs().sum(), outputs.numel())
            return {"loss": outputs.square().mean(), "metrics": {"largest": outputs.detach().max(), "size": size}}

    def steps(graph: bool) -> list[Any]:
        trainer = paceline.Trainer(
            Measured(), {"name": "adamw", "lr": 0.01}, batch=16, log_every=1, graph=graph, run=False, quiet=True
        )
        return trainer.train(tiny.blobs(), epochs=3).steps

    for name in ("largest", "size"):
        assert [record[name] for record in steps(True)] == [record[name] for record in steps(False)]


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(TrainError, match=r"train.graph-and-device"):
        tiny.classifier_trainer(graph=True, device="cpu")


@pytest.mark.parametrize(
    "optimize",
    [
        lambda model: {"name": "adafactor", "lr": 1e-3},
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True),
    ],
)
def test_optimizers_that_run_on_the_host_are_refused(captured: type[GraphsOnCpu], optimize: Any) -> None:
    model = tiny.classifier()
    with pytest.raises(TrainError, match=r"train.graph-and-optimizer"):
        tiny.classifier_trainer(model, graph=True, optimizer=optimize(model))


def test_gradients_can_not_be_shown_to_a_callback(captured: type[GraphsOnCpu]) -> None:
    class Watches:
        def on_gradients(self, gradients: Any) -> None: ...

    with pytest.raises(TrainError, match=r"train.graph-and-callback"):
        trained(True, callbacks=[Watches()])


def test_a_custom_loop_is_refused(captured: type[GraphsOnCpu]) -> None:
    trainer = tiny.classifier_trainer(graph=True)
    with pytest.raises(TrainError, match=r"train.graph-and-loop"):
        trainer.training_step(tiny.blobs()[:4])


@ranks(2)
def test_several_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layout.graph-and-layout"):
        tiny.classifier_trainer(graph=True)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"strategy": "split", "split": {"devices": ["cpu", "cpu"]}}, "layout.graph-and-layout"),
        ({"fsdp": {"offload": True}}, "layout.graph-and-layout"),
        ({"deterministic": "everywhere"}, "layout.graph-and-everywhere"),
    ],
)
def test_layouts_that_are_not_captured_are_refused(settings: dict[str, Any], code: str) -> None:
    with pytest.raises(LayoutError, match=code):
        tiny.classifier_trainer(graph=True, **settings)
