"""Whether an optimizer updates parameters independently."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config.components import OptimizerFacts
from paceline.errors import LayoutError
from paceline.guard.optimizer_check import require_separable
from paceline.log import Log


class Normalized(torch.optim.Optimizer):
    """Divides gradients by their norm over all parameters, or over each one."""

    def __init__(self, params: Any, lr: float, *, over_all: bool = True) -> None:
        super().__init__(params, {"lr": lr, "over_all": over_all})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norms = [parameter.grad.norm() for parameter in group["params"]]
            total = torch.stack(norms).norm()
            for parameter, norm in zip(group["params"], norms, strict=True):
                parameter.sub_(parameter.grad / (total if group["over_all"] else norm), alpha=group["lr"])


class Demanding(torch.optim.SGD):
    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params, lr=0.1)


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]


def test_an_update_that_depends_on_other_parameters_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        require_separable(Normalized(parameters(), 0.1), None, Log(0))
    assert caught.value.code == "layout.optimizer-couples-parameters" and "Normalized" in str(caught.value)


def test_facts_of_a_registered_optimizer_are_believed() -> None:
    require_separable(Normalized(parameters(), 0.1), OptimizerFacts(elementwise=True), Log(0))


@pytest.mark.parametrize(
    "optimizer",
    [
        Normalized(parameters(), 0.1, over_all=False),
        torch.optim.AdamW(parameters()),
        type("OwnAdam", (torch.optim.Adam,), {})(parameters(), lr=0.1, weight_decay=0.1),
    ],
)
def test_independent_updates_are_allowed(optimizer: torch.optim.Optimizer, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    drawn = torch.random.get_rng_state()
    require_separable(optimizer, None, Log(0))
    assert torch.equal(torch.random.get_rng_state(), drawn) and "warning" not in capsys.readouterr().err


def test_an_optimizer_that_can_not_be_tried_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    require_separable(Demanding(parameters(), None), None, Log(0))
    assert "Demanding could not be tried" in capsys.readouterr().err
