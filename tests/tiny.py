"""Small recipes on small data that is easy to learn: twenty steps are enough to see a loss fall."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from paceline import Trainer, register_data


class Patterns(Dataset[dict[str, torch.Tensor]]):
    """Four fixed binary patterns with a few flipped pixels. Sample i is a function of i."""

    draws_randomness = False

    def __init__(self, length: int, labels: bool = True, first: int = 0) -> None:
        self.length, self.labels, self.first = length, labels, first
        self.prototypes = (torch.rand(4, 64, generator=torch.Generator().manual_seed(7)) > 0.5).float()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        label = index % 4
        flips = torch.rand(64, generator=generator) < 0.03
        sample = {"inputs": (self.prototypes[label] - flips.float()).abs().reshape(1, 8, 8)}
        if self.labels:
            sample["targets"] = torch.tensor(label)
        return sample


@register_data("tiny-patterns")
def tiny_patterns(length: int = 50, labels: bool = True) -> tuple[Patterns, Patterns]:
    return Patterns(length, labels), Patterns(13, labels, first=1000)


class Phrases(Dataset[dict[str, torch.Tensor]]):
    """Windows of one sentence, repeated; some end in padding (target -100) when asked."""

    draws_randomness = False
    TEXT = torch.tensor(list(b"the riders share the wind and hold one speed; " * 4))

    def __init__(self, length: int, context: int, padded: bool) -> None:
        self.length, self.context, self.padded = length, context, padded

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * 5 % 46
        window = self.TEXT[start : start + self.context + 1]
        targets = window[1:].clone()
        if self.padded:
            targets[self.context - index % self.context :] = -100
        return {"inputs": window[:-1], "targets": targets}


@register_data("tiny-text")
def tiny_text(length: int = 50, context: int = 16, padded: bool = False) -> tuple[Phrases, Phrases]:
    return Phrases(length, context, padded), Phrases(13, context, padded)


def hand_written_loop(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Dataset[Any], batches: list[list[int]]
) -> None:
    """The loop that an expert writes, with a mean squared error: what the Trainer has to equal."""
    for indices in batches:
        inputs, targets = data[indices]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    """A recipe for mlp, vae, gpt or padded-gpt; it writes nothing and says nothing."""
    gpt = {"name": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 16}
    parts: dict[str, dict[str, Any]] = {
        "mlp": {
            "model": {"name": "mlp", "inputs": 64, "width": 32, "hidden": 1},
            "data": {"name": "tiny-patterns"},
            "optimizer": {"name": "adamw", "lr": 3e-3},
        },
        "vae": {
            "model": {"name": "vae", "size": 8, "channels": 1, "width": 64, "latent": 4},
            "data": {"name": "tiny-patterns", "labels": False},
            "optimizer": {"name": "adamw", "lr": 1e-2},
        },
        # AdamW divides key biases' gradients, which are pure rounding, by themselves; SGD leaves rounding small.
        "gpt": {"model": gpt, "data": {"name": "tiny-text"}, "optimizer": {"name": "sgd", "lr": 0.3}},
        "padded-gpt": {
            "model": {**gpt, "ignore_index": -100},
            "data": {"name": "tiny-text", "padded": True},
            "optimizer": {"name": "sgd", "lr": 0.3},
        },
    }
    return {"train": {"max_steps": 20}, "run": False, "quiet": True, **parts[name], **changes}


def blobs(samples: int = 48, first: int = 0) -> TensorDataset:
    """Points of two classes, as (input, target) pairs."""
    generator = torch.Generator().manual_seed(3 + first)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] > 0).long())


def classifier() -> torch.nn.Sequential:
    """The same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def classifier_trainer(model: torch.nn.Module | None = None, **changes: Any) -> Trainer:
    """A silent trainer of the classifier on batches of 16."""
    settings: dict[str, Any] = {"batch": 16, "run": False, "quiet": True, **changes}
    if "loss_fn" not in settings:
        settings.setdefault("criterion", torch.nn.CrossEntropyLoss())
    settings.setdefault("optimizer", {"name": "adamw", "lr": 1e-2})
    return Trainer(model or classifier(), **settings)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
