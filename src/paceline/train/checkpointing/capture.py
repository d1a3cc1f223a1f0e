"""All of a training as named tensors and plain values: what a checkpoint holds. (`restore.py` is the way back.)

    model/<name>                 weights and buffers
    ema/<name>                   their averages
    optimizer/<name>/<key>       what the optimizer remembers of a parameter
    optimizer-values/<name>/<key>    where that is a plain number
    random/rank-<r>/<generator>  each rank's random state

Names are those of the whole model, so any layout finds its part. Every rank tells what it holds; who writes what of it
is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.shard_file import require_dtype
from paceline.errors import CheckpointError
from paceline.parallel.shards import local_shard
from paceline.runtime import rng
from paceline.runtime.serialization import to_json
from paceline.train.callbacks import Callbacks
from paceline.train.engine import Engine
from paceline.train.evaluation_policy import EvaluationPolicy
from paceline.train.lr import LearningRate

# How torch computes, not what: these stay as this run has them.
SWITCHES = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}


@dataclass(frozen=True)
class StateParts:
    """What a training's state is made of."""

    engine: Engine
    rates: LearningRate
    outcome: EvaluationPolicy
    callbacks: Callbacks


@dataclass
class Snapshot:
    tensors: dict[str, LocalShard] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)  # what a forward may change, so that it has to be copied at once
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def capture(parts: StateParts, include_optimizer: bool = True, metadata: Mapping[str, Any] | None = None) -> Snapshot:
    """References, not copies."""
    engine, state = parts.engine, Snapshot()
    parameters = dict(engine.model.named_parameters())
    _capture_model(engine, state)
    copies = copies_of(engine)
    if engine.average is not None:
        for name, average in engine.average.state_dict().items():
            if name not in copies:
                state.tensors[f"ema/{name}"] = _held(average, parameters[name])
    if include_optimizer:
        _capture_optimizer(engine, parameters, state)
    values: dict[str, Tensor] = {}
    state.values |= {
        "scaler": to_json(engine.scaler.state_dict(), "scaler", values),
        "plateau": None if parts.rates.plateau is None else parts.rates.plateau.state_dict(),
        "scheduler": _scheduler(parts.rates, values),
        "position": {"evaluated": engine.position.evaluated, "epochs_ended": engine.position.epochs_ended},
        "outcome": to_json(parts.outcome.state_dict(), "outcome", values),
        "callbacks": [to_json(own, f"callbacks/{n}", values) for n, own in enumerate(parts.callbacks.state_dicts())],
        "metadata": to_json(dict(metadata or {}), "metadata", values),
    }
    rank = engine.world.rank_info.rank
    if rank == 0:  # those of the others say the same, or are theirs alone
        state.tensors |= {name: LocalShard(tensor) for name, tensor in values.items()}
        state.changing |= set(values)
    for name, held in state.tensors.items():
        require_dtype(name, held.local.dtype)
    for name, tensor in rng.random_state().items():
        state.tensors[f"random/rank-{rank}/{name}"] = LocalShard(tensor)
        state.changing.add(f"random/rank-{rank}/{name}")
    return state


def copies_of(engine: Engine) -> Mapping[str, str]:
    """Parameters that a stage holds a copy of, by name: what the original, which another has, is called."""
    return {} if engine.staging is None else engine.staging.copies


def _held(tensor: Tensor, cut_as: Tensor | None = None) -> LocalShard:
    """`cut_as` is the parameter that the tensor belongs to, where it is a plain piece."""
    cut = tensor if cut_as is None else cut_as
    local = local_shard(tensor)
    return LocalShard(local, cut if isinstance(cut, DTensor) and local.shape == local_shard(cut).shape else None)


def _capture_model(engine: Engine, state: Snapshot) -> None:
    trained = {id(p) for p in engine.model.parameters() if p.requires_grad}
    modules = engine.model.modules()
    renormed = {
        id(module.weight) for module in modules if getattr(module, "max_norm", None) is not None
    }  # in a forward
    names: dict[int, str] = {}
    extra: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    copies = copies_of(engine)
    for name, value in engine.model.state_dict(keep_vars=True).items():
        path = f"model/{name}"
        if not isinstance(value, Tensor):
            extra[name] = to_json(value, f"model-extra/{name}", tensors)
            continue
        first = f"model/{copies[name]}" if name in copies else names.setdefault(id(value), path)
        if first != path:
            state.aliases[path] = first
            continue
        if not isinstance(value, nn.Parameter) and engine.mesh.data_rank != 0:
            continue  # a buffer is the first data rank's, where ranks differ
        state.tensors[path] = _held(value)
        if id(value) not in trained or id(value) in renormed:
            state.changing.add(path)
    state.tensors |= {path: LocalShard(tensor) for path, tensor in tensors.items()}
    state.changing |= set(tensors)
    state.values["extra"] = extra


def _capture_optimizer(engine: Engine, parameters: Mapping[str, nn.Parameter], state: Snapshot) -> None:
    copies = copies_of(engine)
    everything = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    for key in engine.optimizer.state:
        if id(key) not in everything:
            raise _not_held(engine, f"{key!r}, which is no parameter")
    for name, parameter in parameters.items():
        if name in copies:
            continue
        for key, value in engine.optimizer.state.get(held_of(engine, parameter), {}).items():
            if isinstance(value, DTensor) and value.shape != parameter.shape:
                raise _not_held(engine, f"a cut tensor {key!r} of another shape than {name}")
            if isinstance(value, Tensor):
                state.tensors[f"optimizer/{name}/{key}"] = _held(value, parameter if value.dim() else None)
            elif isinstance(value, (bool, int, float)):
                state.tensors[f"optimizer-values/{name}/{key}"] = LocalShard(_number(value))
            elif value is not None:
                raise _not_held(engine, f"a {type(value).__name__} {key!r} of {name}")
    groups, tensors = [], dict[str, Tensor]()
    for number, (settings, names) in enumerate(zip(engine.optimizer.param_groups, engine.optimizer_names, strict=True)):
        kept = {key: value for key, value in settings.items() if key not in SWITCHES}
        groups.append({"settings": to_json(kept, f"optimizer-groups/{number}", tensors), "names": names})
    state.tensors |= {path: LocalShard(tensor) for path, tensor in tensors.items()}
    state.changing |= set(tensors)
    state.values["optimizer"] = {"kind": type(engine.optimizer).__name__, "groups": groups}


def _not_held(engine: Engine, what: str) -> CheckpointError:
    return CheckpointError(
        "optimizer-state",
        f"{type(engine.optimizer).__name__} remembers {what}.",
        why="a checkpoint holds tensors and numbers that an optimizer remembers of each parameter",
        fix="keep it as a tensor in optimizer.state[parameter], or save with include_optimizer=False",
    )


def _number(value: bool | int | float) -> Tensor:
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype)


def held_of(engine: Engine, parameter: Tensor) -> Tensor:
    """What the optimizer holds in a parameter's place."""
    return parameter if engine.cut is None else engine.cut.held_of(parameter)


def _scheduler(rates: LearningRate, tensors: dict[str, Tensor]) -> Any:
    """A scheduler's own attributes; functions (LambdaLR) are the user's and are built again."""
    if rates.scheduler is None:
        return None
    return to_json(_without_functions(rates.scheduler.state_dict()), "scheduler", tensors)


def _without_functions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_functions(inner) for key, inner in value.items() if not callable(inner)}
    if isinstance(value, (list, tuple)):
        return [_without_functions(inner) for inner in value if not callable(inner)]
    return value
