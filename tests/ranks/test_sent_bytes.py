"""With `sync`, records have the bytes that a rank sends in a step. `system/test_counted_traffic.py` compares them with
those of a network interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tiny
from paceline import Trainer
from worlds import ranks

SYNCHRONOUS = {"every": 100, "warmup": 100}
STEPS = 10


def records(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    settings = {"criterion": nn.MSELoss(), "sync": SYNCHRONOUS, "log_every": 5, "run": False, "quiet": True, **settings}
    trainer = Trainer(model, "sgd", batch=8, **settings)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4])
    return trainer.train(data, max_steps=STEPS).steps


def gradient_mb(model: nn.Module) -> float:
    return sum(parameter.nbytes for parameter in model.parameters()) / 1e6


@ranks(2)
def test_gradients_are_counted_once_per_step() -> None:
    model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 4))
    once = records(model)
    assert [step for step in range(STEPS) if "sent_mb" in once[step]] == [4, 9]
    sent = once[-1]["sent_mb/all_reduce"]
    assert gradient_mb(model) < sent < gradient_mb(model) + 1e-3  # the weight of a step, log points, polls
    assert once[-1]["sent_mb"] == sent
    accumulated = records(nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 4)), accumulate=2)
    assert abs(accumulated[-1]["sent_mb"] - sent) < 1e-3


@ranks(4)
def test_a_ring_of_four_sends_one_and_a_half_times_the_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 4))
    assert 1.5 * gradient_mb(model) < records(model)[-1]["sent_mb"] < 1.5 * gradient_mb(model) + 2e-3


@ranks(2)
def test_buffers_and_statistics_of_batch_norm_are_counted() -> None:
    model = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Linear(256, 4))
    last = records(model, sync="powersgd")[-1]  # gradients are in all-reduces
    assert abs(last["sent_mb/all_gather"] - 8 * (4 * 256 + 1) / 1e6) < 1e-5
    buffers = sum(buffer.nbytes for buffer in model.buffers()) / 1e6
    assert abs(last["sent_mb/broadcast"] - buffers / 2) < 1e-5  # rank 0 sends them


@ranks(2)
def test_custom_loops_have_it_and_runs_without_sync_do_not() -> None:
    seen: list[dict[str, Any]] = []

    class Listener:
        def on_log(self, record: dict[str, Any]) -> None:
            seen.append(record)

    trainer = tiny.classifier_trainer(sync=SYNCHRONOUS, log_every=2, callbacks=[Listener()])
    for batch in trainer.loader(tiny.blobs(64)):
        trainer.training_step(batch)
    sent = [record["sent_mb"] for record in seen]
    assert len(sent) == 2 and min(sent) > gradient_mb(trainer.model)
    assert max(sent) < 1.5 * min(sent)  # the pre-flight before the first step is not counted
    assert not any("sent_mb" in record for record in records(nn.Linear(8, 4), sync=None))
