from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import paceline
import tiny
from paceline.train.loss_weights import run_backward


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 1))


def test_gradients_are_those_of_tensor_backward() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    found = []
    for backward in (run_backward, Tensor.backward):
        model.zero_grad()
        backward(loss_of(model), torch.tensor(0.3))
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_loss_without_a_graph_has_the_error_of_tensor_backward() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        run_backward(torch.tensor(1.0), torch.tensor(1.0))


def test_function_modes_see_the_backward() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    value = loss_of(nn.Linear(3, 1))
    with Seen():
        run_backward(value, torch.tensor(1.0))
    assert "backward" in names


def test_a_patched_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(Tensor, "backward", lambda self, *args: seen.append(self))
    value = loss_of(nn.Linear(3, 1))
    run_backward(value, torch.tensor(1.0))
    assert seen == [value]


def test_a_hook_that_changes_the_gradient_of_a_loss_affects_one_step() -> None:
    def losses(steps_with_hook: int) -> list[float]:
        calls = 0

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            value = nn.functional.cross_entropy(model(batch[0]), batch[1])
            if calls <= steps_with_hook and value.requires_grad:
                value.register_hook(lambda gradient: gradient.mul_(0.0))
            return value

        trainer = paceline.Trainer(
            model := tiny.classifier(), torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, run=False,
            quiet=True, device="cpu", log_every=1,
        )  # fmt: skip
        return trainer.train([tiny.blobs(16)[:]] * 6, max_steps=6).losses

    held = losses(2)
    assert held[0] == held[1] and len(set(held[2:])) == 4
