"""An optimizer and a logger that a user registers, from outside the package, train like the built-in ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import LayoutError


class Heavy(torch.optim.Optimizer):
    """SGD with momentum, in the fewest lines."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("velocity", torch.zeros_like(parameter))
                state["velocity"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(group["lr"] * state["velocity"])


def heavy(params: Any, settings: Any, lr: float, *, inertia: float = 0.5) -> Heavy:
    return Heavy(params.groups, lr, inertia)


paceline.register_optimizer("toy-shards", state_per_param=1, elementwise=True)(heavy)
paceline.register_optimizer("toy-dtensors", state_per_param=1)(heavy)
paceline.register_optimizer("toy-full", state_per_param=1, needs_full=True)(heavy)


@paceline.register_logger("toy-lines")
class Lines:
    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        self._file = (run / "toy.txt").open("a")
        self._file.write(f"opened with {settings['optimizer']['inertia']}\n")

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._file.writelines(f"{record['step']}\n" for record in records)

    def close(self) -> None:
        self._file.write("closed\n")
        self._file.close()


def trainer(optimizer: Any, **settings: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return paceline.Trainer(
        model, optimizer, criterion=nn.MSELoss(), batch=8, seed=3, precision="fp64", log_every=1, quiet=True,
        device="cpu", **settings,
    )  # fmt: skip


def train(run: str, name: str, strategy: str, stops: Sequence[int]) -> dict[str, Any]:
    """Train up to each step in turn, each time with a new Trainer that resumes."""
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(50, 6, generator=generator), torch.randn(50, 2, generator=generator)
    )
    optimizer = {"name": name, "lr": 0.05, "inertia": 0.9}
    losses: list[float] = []
    for stop in stops:
        mine = trainer(optimizer, strategy=strategy, run=run, resume="auto", loggers=["toy-lines"])
        losses += mine.train(data, max_steps=stop).losses
    return {"losses": losses, "weights": mine.state_dict()}


def test_a_registered_optimizer_is_torchs_in_disguise_and_resumes(tmp_path: Path) -> None:
    torchs = torch.optim.SGD
    found = train(str(tmp_path / "run"), "toy-shards", "single", [3, 9])

    def build(params: Any, settings: Any, lr: float, *, inertia: float) -> torch.optim.Optimizer:
        return torchs(params.groups, lr=lr, momentum=inertia)

    paceline.register_optimizer("toy-torch")(build)
    expected = train(str(tmp_path / "torch"), "toy-torch", "single", [9])
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("toy-shards", "fsdp"),
        ("toy-full", "ddp"),
        pytest.param("toy-shards", "ddp", marks=pytest.mark.nightly),
        pytest.param("toy-dtensors", "fsdp", marks=pytest.mark.nightly),
    ],
)
def test_registered_components_on_two_ranks_resume_to_the_same_bits(tmp_path: Path, name: str, strategy: str) -> None:
    def launch(run: str, stops: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = paceline.launch(
            train, ranks=2, run=str(tmp_path / run), name=name, strategy=strategy, stops=stops
        )
        return found

    once, twice = launch("once", [9]), launch("twice", [4, 9])
    assert twice["losses"] == once["losses"]
    assert all(torch.equal(twice["weights"][key], value) for key, value in once["weights"].items())
    single = train(str(tmp_path / "single"), name, "single", [9])
    assert once["losses"] == pytest.approx(single["losses"], rel=1e-9)
    first, second = [str(step) for step in range(1, 5)], [str(step) for step in range(5, 10)]
    opened = ["opened with 0.9"]
    lines = (tmp_path / "twice" / "toy.txt").read_text().splitlines()
    assert lines == [*opened, *first, "closed", *opened, *second, "closed"]


def refused() -> str:
    with pytest.raises(LayoutError) as caught:
        trainer({"name": "toy-full"}, strategy="fsdp")
    return caught.value.code


def test_an_optimizer_that_needs_full_weights_is_refused_where_they_are_sharded() -> None:
    assert paceline.launch(refused, ranks=2) == "layout.optimizer-needs-whole-weights"
