"""An optimizer built on the plain model, bound to what a layout left of it. (Training so: ranks/test_fsdp.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import paceline
from paceline.errors import LayoutError
from paceline.parallel.optimizer_binding import assign_shard_gradients, bind, names_of


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter along its first dimension, as FSDP2 does."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            parts = parameter.detach().chunk(mesh.size())
            number = mesh.get_local_rank()
            own = parts[number].clone() if number < len(parts) else parameter.detach()[:0].clone()
            whole = DTensor.from_local(own, mesh, [Shard(0)], shape=parameter.shape, stride=parameter.stride())
            module._parameters[name] = nn.Parameter(whole)


def stepped() -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _bound() -> list[list[object]]:
    paceline.dist.barrier()
    model, optimizer = stepped()
    names, before = (
        names_of(model.named_parameters()),
        {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()},
    )
    steps = {name: float(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    cut(model, init_device_mesh("cpu", (2,)))
    held = bind(optimizer, names, model)
    for parameter in model.parameters():
        parameter.grad = DTensor.from_local(torch.ones_like(parameter.to_local()), parameter.device_mesh, [Shard(0)],
            shape=parameter.shape, stride=parameter.stride())  # fmt: skip
    assign_shard_gradients(held)
    facts: list[list[object]] = []
    for name, parameter in model.named_parameters():
        own, state = held[parameter], optimizer.state[held[parameter]]
        parts = before[name].chunk(2)
        rank = paceline.dist.rank()
        expected = parts[rank] if rank < len(parts) else before[name][:0]
        facts.append([
            type(own) is torch.Tensor and own.data_ptr() == parameter.to_local().data_ptr(),
            torch.equal(state["exp_avg"], expected) and float(state["step"]) == steps[name],
            own.grad is not None and own.grad.shape == own.shape,
        ])  # fmt: skip
    facts.append([optimizer.param_groups is groups, groups[0]["lr"] == 0.1, len(optimizer.state) == 4])
    everyone: list[list[list[object]]] = paceline.dist.all_gather_object(facts)
    return [fact for rank in everyone for fact in rank]


def test_groups_stay_and_weights_state_and_gradients_become_this_ranks_pieces() -> None:
    facts = paceline.launch(_in_a_group, ranks=2, function="bound")
    assert len(facts) == 10
    assert all(all(fact) for fact in facts)


def _in_a_group(function: str) -> object:
    torch.distributed.init_process_group("gloo")
    try:
        return {"bound": _bound, "codes": _codes}[function]()
    finally:
        torch.distributed.destroy_process_group()


def _codes() -> list[str]:
    codes = []
    mesh = init_device_mesh("cpu", (2,))
    for build in (
        lambda model: optim.Adafactor(model.parameters()),
        lambda model: optim.Muon([p for p in model.parameters() if p.dim() == 2]),
    ):
        model = nn.Sequential(nn.Linear(3, 4))
        optimizer, names = build(model), names_of(model.named_parameters())
        cut(model, mesh)
        with pytest.raises(LayoutError) as caught:
            bind(optimizer, names, model)
        codes.append(caught.value.code)
    model, optimizer = stepped()
    names = names_of(model.named_parameters())
    optimizer.state[model[0].weight]["rows"] = torch.zeros(5)
    cut(model, mesh)
    with pytest.raises(LayoutError, match=r"'rows' of 0\.weight") as caught:
        bind(optimizer, names, model)
    return [*codes, caught.value.code]


def test_an_optimizer_that_cannot_be_bound_is_refused() -> None:
    assert paceline.launch(_in_a_group, ranks=2, function="codes") == [
        "layout.optimizer-needs-whole-weights",
        "layout.optimizer-needs-whole-weights",
        "layout.optimizer-state-not-cut",
    ]


def test_parameters_of_other_stages_leave_the_optimizer() -> None:
    model, optimizer = stepped()
    names = names_of(model.named_parameters())
    kept = list(model[1].parameters())
    model[0] = nn.Identity()
    assert bind(optimizer, names, model) == {}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in kept]
    assert set(optimizer.state) == set(kept)
