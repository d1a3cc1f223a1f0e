"""Captured steps (`graph: true`) on a GPU: the bits of eager ones, without waiting, in constant memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
import tiny
from fresh import in_a_fresh_process
from paceline.errors import TrainError

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu"),
    # torch's own: the watch for waiting is a prototype, and a failed capture has an empty graph.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:The CUDA Graph is empty"),
]

ADAMW, SGD = {"name": "adamw", "lr": 0.003}, {"name": "sgd", "lr": 0.01, "momentum": 0.9}


def trained(name: str, graph: bool, steps: int = 16, **changes: Any) -> tuple[paceline.Trainer, list[float]]:
    padded = name == "padded-gpt"
    recipe = tiny.recipe(name, batch=12, device="cuda", graph=graph, **changes)
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    data = None if name == "resnet" else tiny.tiny_text(length=64, padded=padded)[0]
    return trainer, trainer.train(data, max_steps=steps).losses


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": ADAMW},
        {"optimizer": SGD},
        {"schedule": {"name": "cosine", "warmup": 3, "steps": 40}},
        {"optimizer": ADAMW, "accumulate": 3, "clip_norm": 1.0, "ema": 0.99},
        {"clip_value": 0.01, "clip_norm": 0.5, "nonfinite": "skip"},
        {"precision": "bf16", "nonfinite": "stop"},
        {"optimizer": ADAMW, "precision": "fp16", "clip_norm": 1.0},
        {"precision": "fp16", "optimizer": SGD, "accumulate": 2},
        {"recompute": "full"},
        {"tf32": True, "dropout": "per-rank"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt", "padded-gpt"])
def test_replayed_steps_give_the_bits_of_eager_ones(name: str, settings: dict[str, Any]) -> None:
    """64 samples in batches of 12: the last batch of an epoch has 4."""
    eager, expected = trained(name, False, **settings)
    graphed, losses = trained(name, True, **settings)
    assert losses == expected
    assert torch.equal(tiny.weights(graphed), tiny.weights(eager))
    if "ema" in settings:
        with graphed.ema_weights(), eager.ema_weights():
            assert torch.equal(tiny.weights(graphed), tiny.weights(eager))


def test_batch_norm_is_captured() -> None:
    eager, expected = trained("resnet", False)
    graphed, losses = trained("resnet", True)
    assert losses == expected
    pairs = zip(graphed.model.state_dict().values(), eager.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def with_layer(layer: nn.Module) -> nn.Module:
    model = tiny.classifier()
    return nn.Sequential(model[0], layer, model[2])


class Noise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.relu(hidden) + 0.1 * paceline.noise(hidden)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), Noise()], ids=str)
@pytest.mark.parametrize("settings", [{}, {"dropout": "per-rank"}, {"accumulate": 2}], ids=str)
def test_random_numbers_differ_between_steps_as_they_do_eagerly(layer: nn.Module, settings: dict[str, Any]) -> None:
    def run(graph: bool) -> tuple[list[float], Tensor]:
        trainer = tiny.classifier_trainer(with_layer(layer), device="cuda", graph=graph, **settings)
        losses = trainer.train(tiny.blobs(40), epochs=6).losses
        return losses, torch.cuda.get_rng_state()

    losses, state = run(True)
    expected, expected_state = run(False)
    assert losses == expected and torch.equal(state, expected_state)


@pytest.mark.parametrize("settings", [{}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
@pytest.mark.parametrize("dropout", ["by-sample", "exact", "per-rank"])
def test_dropout_in_attention_and_in_recomputed_blocks_is_captured(dropout: str, settings: dict[str, Any]) -> None:
    model = {"name": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 16, "dropout": 0.2}
    losses, expected = (trained("gpt", graph, model=model, dropout=dropout, **settings)[1] for graph in (True, False))
    assert losses == expected


@pytest.mark.parametrize("dropout", ["by-sample", "per-rank"])
def test_a_run_resumes_between_replayed_steps(dropout: str, tmp_path: Path) -> None:
    def build(graph: bool, run: str | bool) -> paceline.Trainer:
        return tiny.classifier_trainer(
            with_layer(nn.Dropout(0.3)), device="cuda", graph=graph, dropout=dropout, ema=0.99, save_every=7,
            eval_every=2, schedule={"name": "cosine", "steps": 30}, run=run,
        )  # fmt: skip

    data, val = tiny.blobs(40), tiny.blobs(20, first=1)
    eager = build(False, False)  # seeds the generator of torch, as each of the others
    expected = eager.train(data, val, max_steps=18)
    assert build(True, str(tmp_path / "whole")).train(data, val, max_steps=18).losses == expected.losses
    build(True, str(tmp_path / "part")).train(data, val, max_steps=9)
    second = build(True, False)
    second.load_checkpoint(tmp_path / "part" / "checkpoints" / "step-000007")
    history = second.train(data, val, max_steps=18)
    assert history.losses == expected.losses[7:] and history.evaluations == expected.evaluations[3:]
    assert torch.equal(tiny.weights(second), tiny.weights(eager))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop])
def test_capturable_optimizers_are_captured(kind: Any) -> None:
    def run(graph: bool) -> list[float]:
        model = tiny.classifier().to("cuda")
        optimizer = kind(model.parameters(), lr=0.01, capturable=True)
        return tiny.classifier_trainer(model, optimizer=optimizer, graph=graph).train(tiny.blobs(), epochs=4).losses

    assert run(True) == run(False)


@pytest.mark.parametrize("setting", ["lr", "weight_decay", "requires_grad", "p"])
def test_what_a_callback_changes_is_captured_again(setting: str) -> None:
    def run(graph: bool) -> list[float]:
        def change(record: Any) -> None:
            if record.step in (6, 12):
                if setting == "requires_grad":
                    next(trainer.model.parameters()).requires_grad_(record.step == 12)
                elif setting == "p":
                    trainer.model[1].p = 0.1 * record.step / 6
                else:
                    trainer.optimizer.param_groups[0][setting] = 0.003 * record.step

        trainer = tiny.classifier_trainer(
            with_layer(nn.Dropout(0.3)), device="cuda", graph=graph, ema=0.9, callbacks=[change]
        )
        return trainer.train(tiny.blobs(40), max_steps=24).losses

    assert run(True) == run(False)


class Reads(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum().item() > 0 else inputs * 2


class Selects(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + inputs[inputs > 0].mean()


@pytest.mark.parametrize(
    ("layer", "operation", "code"),
    [(Reads(), "aten._local_scalar_dense", ".item()"), (Selects(), "aten.", "inputs[inputs > 0]")],
    ids=["item", "boolean-index"],
)
def test_an_operation_that_waits_is_named_with_its_module(layer: nn.Module, operation: str, code: str) -> None:
    trainer = tiny.classifier_trainer(with_layer(layer), device="cuda", graph=True)
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), epochs=4)
    assert caught.value.code == "train.graph-capture" and trainer.step_count == 2
    assert f"in 1 ({type(layer).__name__})" in caught.value.what
    assert operation in caught.value.what and code in caught.value.what
    assert torch.ones(3, device="cuda").sum().item() == 3.0  # the GPU still works


def test_a_nan_is_found_at_the_log_point_with_the_weights_that_its_step_had() -> None:
    inputs, targets = tiny.blobs().tensors
    inputs = inputs.clone()
    inputs[7, 3] = float("nan")

    def finite(index: int) -> TensorDataset:
        return TensorDataset(inputs[index:], targets[index:])

    trainer = tiny.classifier_trainer(device="cuda", graph=True, log_every=10)
    trainer.train(finite(8), max_steps=10)
    before = tiny.weights(trainer)
    broken = TensorDataset(inputs[7:8].expand(16, -1).clone(), targets[:16])
    again = tiny.classifier_trainer(trainer.model, device="cuda", graph=True, log_every=10)
    with pytest.raises(TrainError, match=r"train.nonfinite.*step 1\b"):
        again.train(broken, max_steps=10)
    assert torch.equal(tiny.weights(again), before)


def test_nothing_waits_for_the_gpu_between_log_points() -> None:
    def watch(record: Any) -> None:
        torch.cuda.set_sync_debug_mode("default" if record.step % 8 == 0 or record.step < 5 else "error")

    trainer = tiny.classifier_trainer(
        with_layer(nn.Dropout(0.3)), device="cuda", graph=True, log_every=8, callbacks=[watch], ema=0.9, clip_norm=1.0,
        schedule={"name": "cosine", "steps": 40},
    )  # fmt: skip
    try:
        trainer.train(tiny.blobs(), max_steps=40)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_constant_over_replays_and_freed_at_the_end() -> None:
    allocated: list[int] = []

    def watch(record: Any) -> None:
        if record.step in (20, 520):
            gc.collect()  # of the tests before
            allocated.append(torch.cuda.memory_allocated())

    def train() -> None:
        trainer = tiny.classifier_trainer(device="cuda", graph=True, callbacks=[watch], log_every=10)
        trainer.train(tiny.blobs(), max_steps=521)

    train()  # allocates the workspace of cuBLAS, which stays
    gc.collect()
    allocated.clear()
    before = torch.cuda.memory_allocated()
    train()
    gc.collect()
    assert allocated[0] == allocated[1]
    assert torch.cuda.memory_allocated() - before < 64 * 1024  # the state of the optimizer


def test_compiled_steps_are_captured_too(tmp_path: Path) -> None:
    """In a process of its own, because the compiler leaves workers behind."""
    code = """
import paceline, tiny
for graph in (False, True):
    recipe = tiny.recipe("gpt", batch=12, device="cuda", compile=True, graph=graph)
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    print("losses", *trainer.train(tiny.tiny_text(length=60)[0], max_steps=12).losses)
"""
    done = in_a_fresh_process(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    eager, graphed = (line for line in done.stdout.splitlines() if line.startswith("losses"))
    assert graphed == eager
