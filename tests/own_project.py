"""A project of a user: a recipe, and the code that it names."""

from __future__ import annotations

from pathlib import Path

CODE = """
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from sizes import CLASSES

with open("imported.txt", "a") as file:
    file.write("imported\\n")


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, CLASSES))

    def forward(self, inputs, targets=None):
        logits = self.layers(inputs)
        if targets is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, targets), "logits": logits}


class Rows(Dataset):
    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, inputs[:, :CLASSES].argmax(-1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


def make(samples: int = 60, evaluated: bool = True):
    inputs = torch.randn(samples + 13, 4)  # equal on all ranks, because paceline has seeded the generator
    return Rows(inputs[:samples]), Rows(inputs[samples:]) if evaluated else None


def first_class(outputs, targets):
    return (outputs.argmax(-1) == 0).float()
"""
RECIPE = """
model: {name: "mine_on_ranks:Net", width: 6}
data: {name: mine_on_ranks.py:make, samples: 50}
metrics: [accuracy, "mine_on_ranks:first_class"]
save_best: accuracy
batch: 8
optimizer: {lr: 0.01}
train: {epochs: 3}
device: cpu
"""


def write_project(folder: Path) -> Path:
    """A recipe and its code in a folder below the one that commands are started from."""
    project = folder / "project"
    project.mkdir()
    (project / "mine_on_ranks.py").write_text(CODE)
    (project / "sizes.py").write_text("CLASSES = 3")
    (project / "recipe.yaml").write_text(RECIPE)
    return project
