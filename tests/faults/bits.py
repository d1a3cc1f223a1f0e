"""Whether a checkpoint holds the bits of its step, though the weights change while it is written.

A model with batch norm, an average of its weights and Adam's moments is trained with `save_every: 1`. A callback notes
a hash of all of it after every step, before anything is saved; the checkpoints are compared with that.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from faults import worlds
from faults.saves import read_full
from paceline import Trainer
from paceline.checkpoint import host_copy
from paceline.checkpoint.host_copy import HostCopy
from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.reader import verified
from paceline.parallel.shards import local_shard


def _model(width: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2)
        )


def hashes_of(content: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in content.items()}


class Notes:
    """A callback: what the training holds after each step, under the names that a checkpoint has for it."""

    trainer: Trainer

    def __init__(self) -> None:
        self.steps: list[dict[str, str]] = []

    def on_step(self, record: Any) -> None:
        self.steps.append(hashes_of(dict(self._content())))

    def _content(self) -> Iterator[tuple[str, Tensor]]:
        model, optimizer = self.trainer.model, self.trainer.optimizer
        for name, tensor in model.state_dict().items():
            yield f"model/{name}", local_shard(tensor).detach()
        for name, parameter in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                yield f"optimizer/{name}/{key}", local_shard(optimizer.state[parameter][key])
        with self.trainer.ema_weights():
            for name, parameter in model.named_parameters():
                yield f"ema/{name}", local_shard(parameter).detach().clone()  # the model gets its own weights back


def train(folder: Path, steps: int, width: int) -> list[dict[str, str]]:
    """What a step's hashes are, for every step; its checkpoints lie in `folder` / r / checkpoints."""
    notes = Notes()
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(48, 8, generator=generator)
    notes.trainer = trainer = Trainer(
        _model(width), {"name": "adamw", "lr": 1e-2}, criterion=nn.CrossEntropyLoss(), batch=16, ema=0.9,
        run=str(folder / "r"), save_every=1, keep=None, quiet=True, callbacks=[notes],
    )  # fmt: skip
    trainer.train(TensorDataset(inputs, (inputs[:, 0] > 0).long()), max_steps=steps)
    return notes.steps


def copy_at_the_last_moment() -> None:
    """In a rank's process: what is copied beside training is copied no sooner than it has to be."""
    moment = threading.Event()
    begin, wait, copy_all = HostCopy.begin, HostCopy.wait_for_copy, host_copy._copy_all

    def begun(self: HostCopy, *args: Any) -> None:
        moment.clear()
        begin(self, *args)

    def waited(self: HostCopy) -> None:
        moment.set()
        wait(self)

    def copied(pairs: Any) -> None:
        assert moment.wait(worlds.DEADLINE)
        copy_all(pairs)

    host_copy._cores_are_busy = lambda: False
    HostCopy.begin, HostCopy.wait_for_copy = begun, waited  # type: ignore[method-assign]
    host_copy._copy_all = copied


def wrong_ones(folder: Path, noted: list[dict[str, str]]) -> list[str]:
    """Of the checkpoints of steps 1, 2, …: those that are missing, or hold something else than that step did."""
    found = {checkpoint.manifest.step: checkpoint for checkpoint in verified(LocalStore(folder / "r" / "checkpoints"))}
    wrong = []
    for step, expected in enumerate(noted, start=1):
        held = hashes_of(read_full(found[step], "")) if step in found else {}
        wrong += [f"step {step}: {name}" for name, digest in expected.items() if held.get(name) != digest][:1]
    return wrong
