"""The optimizer may hold other tensors than the parameters of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.config.sections import ScalerSection
from paceline.errors import TrainError
from paceline.log import rank_log
from paceline.parallel.model_parts import ModelParts
from paceline.plan.layout import AXIS_NAMES, Degrees
from paceline.precision.policies import Scaler
from paceline.runtime.mesh import Mesh
from paceline.train.held_params import BoundOptimizer, HeldParams

MESH = Mesh(Degrees(), torch.device("cpu"), None, dict.fromkeys(AXIS_NAMES, 0), None)


def parts_around(model: nn.Module) -> ModelParts:
    return ModelParts(model, None, None, [])


def test_gradients_reach_what_the_optimizer_holds() -> None:
    model = nn.Linear(3, 2)
    copies = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    held = HeldParams(parts_around(model), copies, MESH)
    optimizer = torch.optim.SGD([held.held_of(parameter) for parameter in model.parameters()], lr=1.0)
    model(torch.ones(1, 3)).sum().backward()
    held.assign_gradients()
    optimizer.step()
    assert all(torch.equal(copy, parameter - 1.0) for parameter, copy in copies.items())


def test_a_missing_gradient_is_an_error_unless_it_is_allowed() -> None:
    model = nn.Linear(3, 2)
    copies = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    model.weight.grad = torch.ones(2, 3)
    HeldParams(parts_around(model), copies, MESH).assign_gradients()
    assert copies[model.bias].grad is None
    with pytest.raises(TrainError, match="bias"):
        HeldParams(parts_around(model), copies, MESH, allow_unused=False).assign_gradients()


def test_added_groups_are_taken_over_unless_other_tensors_are_held() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.5)
    scaler = Scaler(torch.device("cpu"), ScalerSection(), enabled=False)
    bound = BoundOptimizer(optimizer, [["0.weight", "0.bias"]], is_users=True, held=None, scaler=scaler)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.25})
    bound.adopt_groups(parts_around(model), rank_log(0, quiet=True))
    assert bound.names == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert optimizer.param_groups[1]["initial_lr"] == 0.25
    bound.held = HeldParams(parts_around(model), {}, MESH)
    with pytest.raises(TrainError, match="add_param_group"):
        bound.adopt_groups(parts_around(model), rank_log(0, quiet=True))
