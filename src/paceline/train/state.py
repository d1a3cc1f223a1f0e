"""All of a training as named tensors and plain values, and back: what a checkpoint holds.

    model/<name>                 weights and buffers
    ema/<name>                   their averages
    optimizer/<name>/<key>       what the optimizer remembers of a parameter
    optimizer-values/<name>/<key>    where that is a plain number
    random/rank-<r>/<generator>  each rank's random state

Names are those of the whole model, so any layout finds its part. Every rank tells what it holds; who writes what of it
is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.plan import Held
from paceline.checkpoint.reading import Checkpoint, read_tensors
from paceline.checkpoint.values import from_json, to_json
from paceline.errors import CheckpointError
from paceline.parallel.pieces import like, piece
from paceline.runtime import seeds
from paceline.train.callbacks import Callbacks
from paceline.train.engine import Engine
from paceline.train.nonfinite import is_fused
from paceline.train.outcome import Outcome
from paceline.train.rates import Rates

# How torch computes, not what: these stay as this run has them.
_SWITCHES = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}


@dataclass(frozen=True)
class Parts:
    """What a training's state is made of."""

    engine: Engine
    rates: Rates
    outcome: Outcome
    callbacks: Callbacks


@dataclass
class Captured:
    tensors: dict[str, Held] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)  # what a forward may change, so that it has to be copied at once
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def capture(parts: Parts, include_optimizer: bool = True, metadata: Mapping[str, Any] | None = None) -> Captured:
    """References, not copies."""
    engine, state = parts.engine, Captured()
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
    rank = engine.world.place.rank
    if rank == 0:  # those of the others say the same, or are theirs alone
        state.tensors |= {name: Held(tensor) for name, tensor in values.items()}
        state.changing |= set(values)
    for name, tensor in seeds.random_state().items():
        state.tensors[f"random/rank-{rank}/{name}"] = Held(tensor)
        state.changing.add(f"random/rank-{rank}/{name}")
    return state


def copies_of(engine: Engine) -> Mapping[str, str]:
    """Parameters that a stage holds a copy of, by name: what the original, which another has, is called."""
    return {} if engine.staging is None else engine.staging.copies


def _held(tensor: Tensor, cut_as: Tensor | None = None) -> Held:
    """`cut_as` is the parameter that the tensor belongs to, where it is a plain piece."""
    cut = tensor if cut_as is None else cut_as
    local = piece(tensor)
    return Held(local, cut if isinstance(cut, DTensor) and local.shape == piece(cut).shape else None)


def _capture_model(engine: Engine, state: Captured) -> None:
    trained = {id(p) for p in engine.model.parameters() if p.requires_grad}
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
        if id(value) not in trained:
            state.changing.add(path)
    state.tensors |= {path: Held(tensor) for path, tensor in tensors.items()}
    state.changing |= set(tensors)
    state.values["extra"] = extra


def _capture_optimizer(engine: Engine, parameters: Mapping[str, nn.Parameter], state: Captured) -> None:
    copies = copies_of(engine)
    for name, parameter in parameters.items():
        if name in copies:
            continue
        for key, value in engine.optimizer.state.get(held_of(engine, parameter), {}).items():
            if isinstance(value, Tensor):
                state.tensors[f"optimizer/{name}/{key}"] = _held(value, parameter if value.dim() else None)
            elif isinstance(value, (bool, int, float)):
                state.tensors[f"optimizer-values/{name}/{key}"] = Held(_number(value))
            elif value is not None:
                to_json(value, f"optimizer/{name}/{key}", {})  # says that it can't be held
                raise CheckpointError(
                    "optimizer-state",
                    f"{type(engine.optimizer).__name__} remembers a {type(value).__name__} {key!r} of {name}.",
                    why="a checkpoint holds an optimizer's tensors and numbers",
                    fix="keep it as a tensor in optimizer.state, or save with include_optimizer=False",
                )
    groups, tensors = [], dict[str, Tensor]()
    for number, (settings, names) in enumerate(zip(engine.optimizer.param_groups, engine.optimizer_names, strict=True)):
        kept = {key: value for key, value in settings.items() if key not in _SWITCHES}
        groups.append({"settings": to_json(kept, f"optimizer-groups/{number}", tensors), "names": names})
    state.tensors |= {path: Held(tensor) for path, tensor in tensors.items()}
    state.changing |= set(tensors)
    state.values["optimizer"] = {"kind": type(engine.optimizer).__name__, "groups": groups}


def _number(value: bool | int | float) -> Tensor:
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype)


def held_of(engine: Engine, parameter: Tensor) -> Tensor:
    """What the optimizer holds in a parameter's place."""
    return parameter if engine.cut is None else engine.cut.held_of(parameter)


def _scheduler(rates: Rates, tensors: dict[str, Tensor]) -> Any:
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


def read(parts: Parts, checkpoint: Checkpoint, *, weights_only: bool = False) -> dict[str, Tensor]:
    """Everything that this rank needs of a checkpoint, compared with its hashes; nothing is changed yet."""
    engine, manifest = parts.engine, checkpoint.manifest
    wanted = {f"model/{name}": tensor for name, tensor in _saved_names(engine).items()}
    _require_fit(engine, checkpoint, wanted)
    remembered = {} if weights_only else _by_parameter(manifest.tensors)
    for name, parameter in engine.model.named_parameters():
        original = copies_of(engine).get(name, name)
        for path in remembered.get(original, {}).values():
            shape = torch.Size(manifest.tensors[path].shape)
            wanted[path] = parameter if shape == parameter.shape else _shaped(shape)
        if engine.average is not None and manifest.entry(f"ema/{original}") is not None:
            wanted[f"ema/{original}"] = parameter
    if not weights_only:
        others = ("scaler", "scheduler", "outcome", "callbacks/", "model-extra/", "optimizer-groups/")
        first = engine.world.place.rank == 0  # looks at the random states of ranks that are no more, too
        mine = "random/" if first else f"random/rank-{engine.world.place.rank}/"
        for prefix in (*others, mine):
            wanted |= {path: _shaped(shape) for path, shape in _under(checkpoint, prefix).items()}
    wanted |= {path: _shaped(shape) for path, shape in _under(checkpoint, "metadata").items()}
    return read_tensors(checkpoint, wanted)


def _by_parameter(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """What an optimizer remembers, by parameter and key: under which path."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        kind, _, rest = path.partition("/")
        if kind in ("optimizer", "optimizer-values"):
            name, _, key = rest.rpartition("/")
            found.setdefault(name, {})[key] = path
    return found


def _under(checkpoint: Checkpoint, prefix: str) -> dict[str, torch.Size]:
    return {n: torch.Size(e.shape) for n, e in checkpoint.manifest.tensors.items() if n.startswith(prefix)}


def _shaped(shape: torch.Size) -> Tensor:
    return torch.empty(shape, device="meta")


def _saved_names(engine: Engine) -> dict[str, Tensor]:
    """The model's tensors, by the names under which they were saved."""
    copies = copies_of(engine)
    state = engine.model.state_dict(keep_vars=True)
    return {copies.get(name, name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _require_fit(engine: Engine, checkpoint: Checkpoint, wanted: Mapping[str, Tensor]) -> None:
    manifest = checkpoint.manifest
    for path, tensor in wanted.items():
        entry, name = manifest.entry(path), path.removeprefix("model/")
        if entry is None:
            raise other_model(checkpoint, f"it has no {name}, which the model has")
        if list(tensor.shape) != entry.shape:
            raise other_model(
                checkpoint, f"{name} has the shape {tuple(entry.shape)}, the model's {tuple(tensor.shape)}"
            )
    if engine.mesh.degrees.pipeline == 1:  # a stage knows its own names only
        saved = [name for name in (*manifest.tensors, *manifest.aliases) if name.startswith("model/")]
        foreign = [name for name in saved if name not in wanted]
        if foreign:
            raise other_model(
                checkpoint, f"it holds {foreign[0].removeprefix('model/')}, which the model does not have"
            )
    sources: dict[int, tuple[str, list[list[str]]]] = {}
    for path, tensor in wanted.items():
        entry = manifest.entry(path)
        assert entry is not None
        hashes = [chunk.hashes for chunk in entry.chunks]
        first, expected = sources.setdefault(id(tensor), (path, hashes))
        if hashes != expected:
            raise other_model(
                checkpoint, f"{first} and {path} are one tensor in this model, and two different ones in it"
            )


def other_model(source: Checkpoint | str, difference: str) -> CheckpointError:
    where = source if isinstance(source, str) else source.folder
    return CheckpointError(
        "other-model",
        f"The checkpoint {where} does not fit this model: {difference}.",
        fix="build the model with the options it was saved with (config.yaml in the run folder)",
    )


@torch.no_grad()
def apply(parts: Parts, checkpoint: Checkpoint, read: Mapping[str, Tensor], *, weights_only: bool = False) -> None:
    """Take over what `read` gave."""
    engine, manifest = parts.engine, checkpoint.manifest
    for name, tensor in _saved_names(engine).items():
        piece(tensor).copy_(read[f"model/{name}"])
    if engine.average is not None:
        copies = copies_of(engine)
        names = {name: copies.get(name, name) for name in engine.average.state_dict()}
        values = {name: read.get(f"ema/{saved}", read[f"model/{saved}"]) for name, saved in names.items()}
        engine.average.load_state_dict(values)
    if weights_only:
        return
    state = manifest.state
    if manifest.optimizer:
        _apply_optimizer(engine, read, from_json(state["optimizer"], read.__getitem__), checkpoint)
    _apply_values(parts, from_json({k: v for k, v in state.items() if k != "optimizer"}, read.__getitem__), checkpoint)
    position = engine.position
    position.was_loaded = True
    position.step, position.epoch = manifest.step, manifest.epoch
    position.evaluated, position.epochs_ended = state["position"]["evaluated"], state["position"]["epochs_ended"]
    _apply_random(engine, checkpoint, read)


def _apply_values(parts: Parts, state: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    engine, rates = parts.engine, parts.rates
    if state["scaler"]:
        engine.scaler.load_state_dict(state["scaler"])
    if rates.plateau is not None and state["plateau"]:
        rates.plateau.load_state_dict(state["plateau"])
    if rates.scheduler is not None and state["scheduler"]:
        own = vars(rates.scheduler)
        counters = {key for key, value in own.items() if isinstance(value, Counter)}
        values = {key: Counter(value) if key in counters else value for key, value in state["scheduler"].items()}
        rates.scheduler.load_state_dict(values)
        if not checkpoint.manifest.optimizer:  # the rates are the optimizer's, and that one is fresh
            for group, rate in zip(engine.optimizer.param_groups, rates.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
    parts.outcome.load_state_dict(state["outcome"])
    parts.callbacks.load_state_dicts(state["callbacks"])
    if state["extra"]:
        engine.model.load_state_dict(state["extra"], strict=False)


def _apply_optimizer(
    engine: Engine, read: Mapping[str, Tensor], saved: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    optimizer = engine.optimizer
    optimizer.state.clear()  # in place, as its parts may share it
    on_device, copies, remembered = is_fused(optimizer), copies_of(engine), _by_parameter(read)
    for name, parameter in engine.model.named_parameters():
        held, own = held_of(engine, parameter), piece(parameter)
        for key, path in remembered.get(copies.get(name, name), {}).items():
            value = read[path]
            if path.startswith("optimizer-values/"):
                optimizer.state[held][key] = value.item()
                continue
            if value.dim() and value.shape == own.shape:
                value = value.to(own.device, own.dtype if value.is_floating_point() else None, copy=True)
                value = value if held is not parameter else like(parameter, value)
            else:  # the number of steps: fused kernels count where they compute
                value = value.to(own.device if on_device or value.dim() else value.device, copy=True)
            optimizer.state[held][key] = value
    for group, other in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in other["settings"].items() if key not in _SWITCHES})


def require_same_optimizer(engine: Engine, checkpoint: Checkpoint) -> None:
    saved, kind = checkpoint.manifest.state.get("optimizer"), type(engine.optimizer).__name__
    if not checkpoint.manifest.optimizer or saved is None:
        return
    fix = "build the same optimizer; or load_checkpoint(…, weights_only=True) and begin with a fresh one"
    if saved["kind"] != kind:
        what = f"The checkpoint {checkpoint.folder} holds the state of {saved['kind']}, but the optimizer is {kind}."
        raise CheckpointError("other-optimizer", what, fix=fix)
    if [group["names"] for group in saved["groups"]] != engine.optimizer_names:
        what = f"The parameter groups of the optimizer in {checkpoint.folder} hold other parameters than this one's."
        raise CheckpointError("other-optimizer", what, fix=fix)


def _apply_random(engine: Engine, checkpoint: Checkpoint, read: Mapping[str, Tensor]) -> None:
    """The random state that this rank had, where there was such a rank; else a fresh one, of this step."""
    prefix = f"random/rank-{engine.world.place.rank}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in read.items() if name.startswith(prefix)}
    if own and checkpoint.manifest.layout == engine.layout_facts():
        seeds.set_random_state(own)
    else:
        engine.seed_drawing(checkpoint.manifest.step)
