"""`fsdp: {param_dtype, reduce_dtype}` without `precision` compute as FSDP's MixedPrecisionPolicy does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import dist
from paceline.errors import TrainError
from worlds import ranks


def regression() -> tuple[nn.Sequential, TensorDataset]:
    torch.manual_seed(0)
    inputs = torch.randn(32, 8)
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(8, 1)), TensorDataset(inputs, inputs.sum(1, keepdim=True))


def losses_in_half(dtype: torch.dtype) -> list[float]:
    model, data = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        for start in range(0, 32, 8):
            inputs, targets = data[start : start + 8]
            half = copy.deepcopy(model).to(dtype)
            loss = nn.functional.mse_loss(half(inputs.to(dtype)), targets)
            loss.backward()
            for parameter, computed in zip(model.parameters(), half.parameters(), strict=True):
                assert computed.grad is not None
                parameter.grad = computed.grad.float()
            optimizer.step()
            losses.append(loss.item())
    return losses


@ranks(2)
def test_operations_run_in_param_dtype_and_targets_keep_theirs() -> None:
    seen: list[Any] = []

    class Criterion(nn.MSELoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            seen.append((outputs.dtype, targets.dtype))
            return super().forward(outputs, targets)

    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model, data = regression()
        settings: Any = {"strategy": "fsdp", "fsdp": {"param_dtype": name, "reduce_dtype": name}, "log_every": 1}
        settings |= {"batch": 8, "shuffle": False, "device": "cpu", "run": False, "quiet": True}
        trainer = paceline.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), criterion=Criterion(), **settings
        )
        losses = trainer.train(data, epochs=3).losses
        assert set(seen) == {(dtype, torch.float32)}
        assert losses == pytest.approx(losses_in_half(dtype), rel=0.02)
        assert all(weight.dtype == torch.float32 for weight in trainer.state_dict().values()) or dist.rank() != 0
        seen.clear()


class WantsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        return loss


class RequiresClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("kind", [WantsClosure, RequiresClosure])
def test_an_optimizer_that_needs_a_closure_is_refused(kind: Any) -> None:
    model, data = regression()
    with pytest.raises(TrainError) as caught:
        settings: Any = {"criterion": nn.MSELoss(), "batch": 8, "device": "cpu", "run": False, "quiet": True}
        paceline.Trainer(model, kind(model.parameters(), lr=0.1), **settings).train(data, epochs=1)
    assert caught.value.code == "train.needs-closure"


@ranks(2)
def test_a_batchmean_criterion_trains_as_in_one_process() -> None:
    def build() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 3), nn.LogSoftmax(1)).double()
        inputs = torch.randn(30, 8, dtype=torch.float64)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(inputs, inputs[:, :3].softmax(1))

    criterion = nn.KLDivLoss(reduction="batchmean")
    plain, optimizer, data = build()
    for start in range(0, 30, 8):
        inputs, targets = data[start : start + 8]
        optimizer.zero_grad()
        criterion(plain(inputs), targets).backward()
        optimizer.step()
    model, optimizer, data = build()
    settings: Any = {"batch": 8, "shuffle": False, "precision": "fp64", "device": "cpu", "run": False, "quiet": True}
    paceline.Trainer(model, optimizer, criterion=criterion, **settings).train(data, epochs=1)
    assert torch.allclose(model[0].weight, plain[0].weight, rtol=1e-10)
