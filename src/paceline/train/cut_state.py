"""The state of a model that is cut over ranks: whole on rank 0 for a checkpoint, and back into every rank's pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.folder import Snapshot
from paceline.parallel.pieces import fill, like, piece, piece_of, whole
from paceline.runtime import collectives
from paceline.train.engine import Engine
from paceline.train.nonfinite import is_fused

State = tuple[dict[str, Tensor], dict[str, Tensor] | None, dict[str, Any] | None]


def gather(engine: Engine, include_optimizer: bool) -> State:
    """Model, averages and optimizer, as they would be on one rank; empty but on rank 0. All ranks have to come."""
    parameters = dict(engine.model.named_parameters())
    model = whole(engine.model.state_dict(), engine.mesh)
    average = None
    if engine.average is not None:
        pieces = engine.average.state_dict()
        copies = copies_of(engine)
        own = {name: like(parameters[name], own) for name, own in pieces.items() if name not in copies}
        average = whole(own, engine.mesh)
    return model, average, _gather_optimizer(engine, parameters) if include_optimizer else None


def _gather_optimizer(engine: Engine, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    assert engine.cut is not None
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    copies = copies_of(engine)
    for name, parameter in parameters.items():
        if name in copies:
            continue
        for key, value in engine.optimizer.state.get(engine.cut.held_of(parameter), {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = like(parameter, value)
            else:
                values.setdefault(name, {})[key] = value
    numbers = {name: number for number, name in enumerate(flat_names(engine))}
    state: dict[int, dict[str, Any]] = {}
    for path, tensor in whole(tensors, engine.mesh).items():
        name, _, key = path.rpartition("/")
        state.setdefault(numbers[name], {})[key] = tensor
    for stage in collectives.all_gather_object(values):
        for name, entries in stage.items():
            state.setdefault(numbers[name], {}).update(entries)
    groups = []
    for settings, names in zip(engine.optimizer.param_groups, engine.optimizer_names, strict=True):
        kept = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
        groups.append({**kept, "params": [numbers[name] for name in names]})
    return {"state": state, "param_groups": groups}


def copies_of(engine: Engine) -> dict[str, str]:
    """Parameters that a stage holds a copy of, by name: what the original, which another has, is called."""
    return {} if engine.staging is None else engine.staging.copies


def flat_names(engine: Engine) -> list[str]:
    """The optimizer's parameters on the whole model, in its order."""
    return [name for group in engine.optimizer_names for name in group]


def require_fit(engine: Engine, snapshot: Snapshot) -> None:
    """Raises what torch's load_state_dict would: a RuntimeError with the names."""
    mine = engine.model.state_dict()
    for name, tensor in mine.items():
        saved = snapshot.model.get(name)
        if saved is None or saved.shape != tensor.shape:
            there = "is missing" if saved is None else f"has the shape {tuple(saved.shape)}"
            raise RuntimeError(f"{name} {there}; the model's has {tuple(tensor.shape)}")
    foreign = [name for name in snapshot.model if name not in mine]
    if foreign and engine.mesh.degrees.pipeline == 1:  # a stage knows its own names only
        raise RuntimeError(f"it holds {foreign[0]}, which the model does not have")


@torch.no_grad()
def scatter(engine: Engine, snapshot: Snapshot) -> None:
    """This rank's pieces of everything in the checkpoint."""
    require_fit(engine, snapshot)
    for name, tensor in engine.model.state_dict().items():
        fill(tensor, snapshot.model[name])
    parameters = dict(engine.model.named_parameters())
    if engine.average is not None:
        averages = snapshot.ema or snapshot.model
        copies, names = copies_of(engine), engine.average.state_dict()
        own = {name: piece_of(averages[copies.get(name, name)], parameters[name]) for name in names}
        engine.average.load_state_dict(own)
    if snapshot.optimizer is not None:
        _scatter_optimizer(engine, parameters, snapshot.optimizer)


def _scatter_optimizer(engine: Engine, parameters: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    assert engine.cut is not None
    numbers = {name: number for number, name in enumerate(flat_names(engine))}
    engine.optimizer.state.clear()  # in place, as its parts may share it
    on_device, copies = is_fused(engine.optimizer), copies_of(engine)
    for name, parameter in parameters.items():
        held = engine.cut.held_of(parameter)
        own = piece(parameter)
        for key, value in saved["state"].get(numbers.get(copies.get(name, name), -1), {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                value = piece_of(value, parameter).to(own.device, own.dtype, copy=True)
                value = value if held is not parameter else like(parameter, value)
            elif isinstance(value, Tensor):  # the number of steps: fused kernels count where they compute
                value = value.to(own.device if on_device else value.device, copy=True)
            engine.optimizer.state[held][key] = value
    for group, settings in zip(engine.optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key not in ("params", "param_names")})
