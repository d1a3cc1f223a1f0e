"""The methods that slow_network.py compares, and the models that it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import Dataset, default_collate

import paceline
from paceline.train.recipe_objects import build_data, build_meta_model

RECIPES = Path(__file__).parents[1] / "recipes"
EVERY = 50
LOSS_STEPS, LOSS_WARM_UP = 1000, 200
MLP = {
    "model": {"name": "mlp", "inputs": 2048, "width": 2048, "hidden": 4, "classes": 10},
    "optimizer": {"name": "adamw", "lr": 1e-4},
    "batch": 8,
}


@dataclass(frozen=True)
class Method:
    name: str
    sync: tuple[str, ...] = ()  # overrides of a recipe
    hook: Callable[[], tuple[Any, Any]] | None = None  # torch's: its state and the function
    by_hand: bool = False
    share: float = 1.0  # of DDP's bytes, roughly: decides how many steps are measured

    @property
    def is_local(self) -> bool:
        return f"sync.every={EVERY}" in self.sync


def powersgd_by_torch(rank: int) -> tuple[Any, Any]:
    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2), powerSGD_hook


def local(*more: str) -> tuple[str, ...]:
    return (f"sync.every={EVERY}", *more)


NESTEROV = "sync.outer.name=nesterov"
RANKS = (1, 2, 4)  # of PowerSGD
METHODS = (
    Method("DDP"),
    Method("torch DDP", by_hand=True),
    Method("torch fp16", by_hand=True, hook=lambda: (None, fp16_compress_hook), share=0.5),
    *(
        Method(f"torch powersgd, rank {rank}", by_hand=True, hook=partial(powersgd_by_torch, rank), share=0.02)
        for rank in RANKS
    ),
    Method("fp16", ("sync.compress=fp16",), share=0.5),
    Method("bf16", ("sync.compress=bf16",), share=0.5),
    Method("int8", ("sync.compress=int8",), share=0.25),
    *(
        Method(f"powersgd, rank {rank}", ("sync.compress=powersgd", f"sync.rank={rank}"), share=0.005 * rank)
        for rank in (*RANKS, 32)
    ),
    Method("local SGD", local()),
    Method("DiLoCo", local(NESTEROV)),
    Method("DiLoCo, bf16", local(NESTEROV, "sync.compress=bf16")),
    Method("DiLoCo, int8", local(NESTEROV, "sync.compress=int8")),
)


class Samples(Dataset[dict[str, Tensor]]):
    """In memory, so that reading takes no time."""

    draws_randomness = False

    def __init__(self, samples: Sequence[dict[str, Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


@dataclass(frozen=True)
class Case:
    name: str
    config: Callable[[Sequence[str]], paceline.Config]  # with overrides
    data: Callable[[], tuple[Any, ...]]  # for training and validation

    @property
    def batch(self) -> int:
        return self.config(()).batch or 0

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in build_meta_model(self.config(())).parameters())

    def batches(self, size: int, different: int = 8) -> list[Any]:
        data = self.data()[0]
        return [default_collate([data[n * size + i] for i in range(size)]) for n in range(different)]


def resnet_config(overrides: Sequence[str]) -> paceline.Config:
    return paceline.Config.from_file(RECIPES / "resnet.yaml", overrides)


def mlp_config(overrides: Sequence[str]) -> paceline.Config:
    return paceline.Config.from_dict(MLP, overrides)


@cache
def gpt_data() -> tuple[Any, Any]:
    return build_data(paceline.Config.default())


@cache
def resnet_data() -> tuple[Any, ...]:
    training, validation = build_data(resnet_config(()))
    return tuple(Samples([data[index] for index in range(len(data))]) for data in (training, validation))


@cache
def mlp_data(samples: int = 8 * LOSS_STEPS, classes: int = 10) -> tuple[Any, Any]:
    """Points around ten centers; three labels in ten are random, so that the loss has a floor well above zero."""
    random = torch.Generator().manual_seed(0)
    centers = torch.randn(classes, 2048, generator=random) * 0.1

    def draw(number: int) -> Samples:
        labels = torch.randint(classes, (number,), generator=random)
        inputs = centers[labels] + torch.randn(number, 2048, generator=random)
        wrong = torch.rand(number, generator=random) < 0.3
        targets = torch.where(wrong, torch.randint(classes, (number,), generator=random), labels)
        return Samples([{"inputs": x, "targets": y} for x, y in zip(inputs, targets, strict=True)])

    return draw(samples), draw(2048)


CASES = (
    Case("gpt", paceline.Config.default, gpt_data),
    Case("resnet", resnet_config, resnet_data),
    Case("mlp", mlp_config, mlp_data),
)
