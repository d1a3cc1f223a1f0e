"""From a checkpoint back into a training: first everything is read and compared, then it is taken over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.reader import Checkpoint, read_tensors
from paceline.errors import CheckpointError
from paceline.optim.optimizers import reset_state
from paceline.parallel.shards import as_dtensor_like, local_shard
from paceline.runtime import rng
from paceline.runtime.serialization import from_json
from paceline.train.checkpointing.capture import SWITCHES, StateParts, copies_of, held_of
from paceline.train.engine import Engine
from paceline.train.nonfinite import is_fused


def read(parts: StateParts, checkpoint: Checkpoint, *, weights_only: bool = False) -> dict[str, Tensor]:
    """Everything that this rank needs of a checkpoint, compared with its hashes; nothing is changed yet."""
    engine, manifest = parts.engine, checkpoint.manifest
    wanted = {f"model/{name}": tensor for name, tensor in _saved_names(engine).items()}
    _require_fit(engine, checkpoint, wanted)
    if not weights_only:
        require_same_optimizer(engine, checkpoint)
    remembered = {} if weights_only else _by_parameter(manifest.tensors)
    for name, parameter in engine.model.named_parameters():
        original = copies_of(engine).get(name, name)
        for path in remembered.get(original, {}).values():
            shape = torch.Size(manifest.tensors[path].shape)
            wanted[path] = parameter if shape == parameter.shape else _shaped(shape)
        if engine.average is not None and manifest.entry(f"ema/{original}") is not None:
            wanted[f"ema/{original}"] = parameter
    wanted |= {path: _shaped(shape) for path, shape in _under(checkpoint, "model-extra/").items()}
    if not weights_only:
        others = ("scaler", "scheduler", "outcome", "callbacks/", "optimizer-groups/")
        first = engine.world.rank_info.rank == 0  # looks at the random states of ranks that are no more, too
        mine = "random/" if first else f"random/rank-{engine.world.rank_info.rank}/"
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
def apply(
    parts: StateParts,
    checkpoint: Checkpoint,
    read: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    weights_only: bool = False,
) -> None:
    """Take over what `read` and `plain_values` gave."""
    engine, manifest = parts.engine, checkpoint.manifest
    _apply_model(engine, read, values["extra"])
    if engine.average is not None:
        copies = copies_of(engine)
        names = {name: copies.get(name, name) for name in engine.average.state_dict()}
        averages = {name: read.get(f"ema/{saved}", read[f"model/{saved}"]) for name, saved in names.items()}
        engine.average.load_state_dict(averages)
    if weights_only:
        reset_state(engine.optimizer)
        engine.position.reset()
        return
    if manifest.optimizer:
        _apply_optimizer(engine, read, values["optimizer"], checkpoint)
    else:
        reset_state(engine.optimizer)
    _apply_values(parts, values, checkpoint)
    position = engine.position
    position.step, position.epoch = manifest.step, manifest.epoch
    position.evaluated, position.epochs_ended = values["position"]["evaluated"], values["position"]["epochs_ended"]
    engine.updater.keep_buffers()
    _apply_random(engine, checkpoint, read)


def plain_values(checkpoint: Checkpoint, read: Mapping[str, Tensor], *, weights_only: bool) -> dict[str, Any]:
    """The checkpoint's plain values, with their tensors put back; an error here comes before anything is changed."""
    state = checkpoint.manifest.state
    wanted = {"extra": state["extra"]} if weights_only else state
    values: dict[str, Any] = from_json(wanted, read.__getitem__)
    return values


def _apply_model(engine: Engine, read: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    """Into parameters and buffers in place. What else a state dict holds (extra state, copies that a hook made) goes
    the way that the model has for it."""
    own = {id(tensor) for tensor in (*engine.model.parameters(), *engine.model.buffers())}
    others = dict(extra)
    for name, tensor in _saved_names(engine).items():
        if id(tensor) in own:
            local_shard(tensor).copy_(read[f"model/{name}"])
        else:
            others[name] = read[f"model/{name}"]
    if others:
        engine.model.load_state_dict(others, strict=False)


def _apply_values(parts: StateParts, state: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    engine, rates = parts.engine, parts.rates
    if state["scaler"]:
        engine.scaler.load_state_dict(state["scaler"])
    if rates.plateau is not None and state["plateau"]:
        rates.plateau.load_state_dict(state["plateau"])
    if rates.scheduler is not None and state["scheduler"]:
        rates.scheduler.load_state_dict(_with_counters(state["scheduler"], rates.scheduler.state_dict()))
        if not checkpoint.manifest.optimizer:  # the rates are the optimizer's, and that one is fresh
            for group, rate in zip(engine.optimizer.param_groups, rates.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
    parts.outcome.load_state_dict(state["outcome"])
    parts.callbacks.load_state_dicts(state["callbacks"])


def _with_counters(saved: Any, own: Any) -> Any:
    """MultiStepLR wants the Counter that it had, also inside of a SequentialLR."""
    if isinstance(own, Counter):
        return Counter(saved)
    if isinstance(saved, dict) and isinstance(own, dict):
        return {key: _with_counters(value, own.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_with_counters(*pair) for pair in zip(saved, own, strict=True)]
    return saved


def _apply_optimizer(
    engine: Engine, read: Mapping[str, Tensor], saved: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    optimizer = engine.optimizer
    optimizer.state.clear()  # in place, as its parts may share it
    copies, remembered, entries = copies_of(engine), _by_parameter(read), checkpoint.manifest.entry
    on_device = is_fused(optimizer) or any(group.get("capturable") for group in optimizer.param_groups)
    for name, parameter in engine.model.named_parameters():
        held, own = held_of(engine, parameter), local_shard(parameter)
        for key, path in remembered.get(copies.get(name, name), {}).items():
            value = read[path]
            if path.startswith("optimizer-values/"):
                optimizer.state[held][key] = value.item()
                continue
            saved_as, weight = entries(path), entries(f"model/{copies.get(name, name)}")
            if key == "step":  # kernels that count on the device look for it there, others on the CPU
                value = value.to(own.device if on_device else "cpu", copy=True)
            elif value.shape == own.shape:
                # As the weight is: fused kernels go by memory, so strides have to be the same (channels_last).
                with_weight = saved_as is not None and weight is not None and saved_as.dtype == weight.dtype
                value = torch.empty_like(own, dtype=own.dtype if with_weight else value.dtype).copy_(value)
                value = value if held is not parameter else as_dtensor_like(parameter, value)
            else:
                value = value.to(own.device, copy=True)
            optimizer.state[held][key] = value
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it has stepped, elsewhere: torch's schedulers ask for it
    for group, other in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in other["settings"].items() if key not in SWITCHES})


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
    prefix = f"random/rank-{engine.world.rank_info.rank}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in read.items() if name.startswith(prefix)}
    if own and checkpoint.manifest.layout == engine.layout_facts():
        rng.set_random_state(own)
    else:
        engine.seed_drawing(checkpoint.manifest.step)
