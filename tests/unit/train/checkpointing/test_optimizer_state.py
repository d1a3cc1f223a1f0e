from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.errors import CheckpointError
from resumable import Net, points, require_same_end, trainer


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 5, 3), nn.Linear(5, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.convolution(images).mean((2, 3)))
        return result


def test_a_fused_optimizer_finds_its_memory_of_channels_last_weights_in_order(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(64, 3, 6, 6, generator=draw), torch.randn(64, 1, generator=draw))
    fused = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)}
    require_same_end(lambda: trainer(Convolution, **fused), tmp_path, images)


class Master(torch.optim.Optimizer):
    """Keeps wide copies of narrow weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.003})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float().clone()
            state["master"] -= 0.003 * parameter.grad.float()
            parameter.copy_(state["master"])


def test_wide_state_of_narrow_weights_stays_wide(tmp_path: Path) -> None:
    require_same_end(lambda: trainer(lambda: Net().bfloat16(), Master), tmp_path, points())


@pytest.mark.parametrize("kind", ["weights_only", "without optimizer", "file"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_weights_alone_leave_no_memory_of_what_was_trained_before(tmp_path: Path, kind: str, optimizer: Any) -> None:
    source = trainer(optimizer=optimizer)
    source.train(points(), max_steps=4)
    source.save_checkpoint(tmp_path / "c", include_optimizer=kind == "weights_only")
    torch.save(source.model.state_dict(), tmp_path / "c.pt")
    used, fresh = trainer(optimizer=optimizer), trainer(optimizer=optimizer)
    used.train(points(), max_steps=9)
    for one in (used, fresh):
        path = tmp_path / ("c.pt" if kind == "file" else "c")
        one.load_checkpoint(path, weights_only=kind == "weights_only")
        assert one.step_count == (4 if kind == "without optimizer" else 0)
        one.train(points(), max_steps=12)
    assert torch.equal(used.model.first.weight, fresh.model.first.weight)


class Global(torch.optim.SGD):
    """Remembers something of no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"]["steps"] = 1  # type: ignore[index]
        super().step()


def test_what_an_optimizer_remembers_of_no_parameter_is_refused(tmp_path: Path) -> None:
    one = trainer(optimizer=lambda p: Global(p, lr=0.1))
    one.train(points(), max_steps=1)
    with pytest.raises(CheckpointError, match=r"checkpoint\.optimizer-state.*'all'"):
        one.save_checkpoint(tmp_path / "c")
