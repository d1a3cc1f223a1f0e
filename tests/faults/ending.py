"""A small training that ends as `WAY` says: the parts of a recipe, a script for any launcher, and a function for
`paceline.launch`. `TARGET` is the process that a person started, which is where signals go."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

LAST_CALL = 6  # of the model, in which it happens
STEPS = 12
REASON = "the injected reason"
_FOR_EVER = 1_000_000  # steps of a training that a signal ends


def way() -> str:
    return os.environ["WAY"]


def is_victim() -> bool:
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1


def raise_in(place: str) -> None:
    if way() == f"exception in {place}" and is_victim():
        raise ValueError(REASON)


def end_here() -> None:
    """What ends the training from within a step."""
    match way():
        case "SIGINT" | "SIGTERM":
            os.kill(int(os.environ["TARGET"]), getattr(signal, way()))
        case "SIGKILL of the launcher":
            os.kill(int(os.environ["TARGET"]), signal.SIGKILL)
        case "SIGKILL" | "SIGSEGV":
            os.kill(os.getpid(), getattr(signal, way()))
        case "os._exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(3)
        case "hang, Ctrl-C":
            hang_until_killed()


def hang_until_killed() -> None:
    """Until it is killed: a first Ctrl-C asks for the end of a step that never ends."""
    Path("hangs").touch()
    signal.pause()
    Path("heard").touch()
    while True:
        signal.pause()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Any:
        self.calls += self.training
        if self.calls == LAST_CALL and self.training and is_victim():
            raise_in("model")
            end_here()
        return self.linear(inputs)


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40:  # on whichever rank has it
            fail_on_any("data")
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.ones(1)


def fail_on_any(place: str) -> None:
    if way() == f"exception in {place}":
        raise ValueError(REASON)


class Callback:
    def on_step(self, record: Any) -> None:
        if record.step == LAST_CALL:
            raise_in("callback")


class RecipeModel(Model):
    """Of a recipe, which has no script and no callbacks: the code that builds it takes their place, and a metric."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        outputs = super().forward(inputs)
        return {"loss": nn.functional.mse_loss(outputs, targets), "outputs": outputs}


def build() -> nn.Module:
    raise_in("main")
    return RecipeModel()


def make() -> tuple[Data, Data]:
    return Data(), Data()


def metric(outputs: Tensor, targets: Tensor) -> Tensor:
    raise_in("callback")
    return (outputs - targets).abs().mean(dim=1)


def main(loop: str = "train") -> None:
    steps = _FOR_EVER if way() in ("SIGINT", "SIGTERM", "SIGKILL of the launcher") else STEPS
    trainer = paceline.Trainer(
        Model(), {"name": "sgd", "lr": 0.01}, criterion=nn.MSELoss(), batch=8, callbacks=[Callback()], run="end"
    )
    if loop == "train":
        trainer.train(Data(), max_steps=steps)
    else:
        while trainer.step_count < steps:
            for batch in trainer.loader(Data()):
                trainer.training_step(batch)
    raise_in("main")


if __name__ == "__main__":
    main(*sys.argv[1:])
