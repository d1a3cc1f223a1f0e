"""The optimizer state, as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import ShardedState, ShardedStateful, targets_below
from paceline.errors import CheckpointError
from paceline.optim.fused import is_fused
from paceline.parallel.shards import as_dtensor_like, local_shard
from paceline.runtime.serialization import to_json
from paceline.train.checkpointing.model_state import shard_of
from paceline.train.checks.run_setup import SWITCHES
from paceline.train.engine import Engine


class OptimizerState(ShardedStateful):
    """The state of each parameter, and the settings of the parameter groups."""

    value_key = "optimizer"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def sharded_state(self) -> ShardedState:
        engine, state = self._engine, ShardedState()
        self._require_parameters()
        copies = engine.parts.tied_copies
        for name, parameter in engine.parts.named_parameters():
            if name not in copies:
                self._add_state_of(name, parameter, state)
        groups, tensors = [], dict[str, Tensor]()
        both = zip(engine.bound.optimizer.param_groups, engine.bound.names, strict=True)
        for number, (settings, names) in enumerate(both):
            kept = {key: value for key, value in settings.items() if key not in SWITCHES}
            groups.append({"settings": to_json(kept, f"optimizer-groups/{number}", tensors), "names": names})
        state.tensors |= {path: LocalShard(tensor) for path, tensor in tensors.items()}
        state.volatile |= set(tensors)
        state.values = {"kind": type(engine.bound.optimizer).__name__, "groups": groups}
        return state

    def _require_parameters(self) -> None:
        optimizer = self._engine.bound.optimizer
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key in optimizer.state:
            if id(key) not in parameters:
                raise self._unsupported(f"{key!r}, which is not a parameter")

    def _add_state_of(self, name: str, parameter: nn.Parameter, state: ShardedState) -> None:
        for key, value in self._engine.bound.optimizer.state.get(self._held(parameter), {}).items():
            if isinstance(value, DTensor) and value.shape != parameter.shape:
                raise self._unsupported(f"{name}: {key!r} is a DTensor of another shape")
            if isinstance(value, Tensor):
                state.tensors[f"optimizer/{name}/{key}"] = shard_of(value, parameter if value.dim() else None)
            elif isinstance(value, (bool, int, float)):
                state.tensors[f"optimizer-values/{name}/{key}"] = LocalShard(_number(value))
            elif value is not None:
                raise self._unsupported(f"{name}: {key!r} is a {type(value).__name__}")

    def _unsupported(self, where: str) -> CheckpointError:
        return CheckpointError(
            "optimizer-state", f"{type(self._engine.bound.optimizer).__name__} has unsupported state for {where}."
        )

    def _held(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer has for a parameter."""
        return parameter if self._engine.bound.held is None else self._engine.bound.held.held_of(parameter)

    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        manifest = checkpoint.manifest
        self._require_same_optimizer(checkpoint)
        copies, saved = self._engine.parts.tied_copies, _paths_by_parameter(manifest.tensors)
        targets = targets_below(manifest, "optimizer-groups")
        for name, parameter in self._engine.parts.named_parameters():
            for path in saved.get(copies.get(name, name), {}).values():
                shape = torch.Size(manifest.tensors[path].shape)
                targets[path] = parameter if shape == parameter.shape else torch.empty(shape, device="meta")
        return targets

    def _require_same_optimizer(self, checkpoint: Checkpoint) -> None:
        saved, kind = checkpoint.manifest.state["optimizer"], type(self._engine.bound.optimizer).__name__
        fix = "build the same optimizer, or load only the weights: load_checkpoint(…, weights_only=True)"
        where = checkpoint.at
        if saved["kind"] != kind:
            what = f"Checkpoint {where} has the state of {saved['kind']}, but the optimizer is {kind}."
            raise CheckpointError("other-optimizer", what, fix=fix)
        names = [group["names"] for group in saved["groups"]]
        # An optimizer may hold frozen parameters, of which the checkpoint of one without them knows nothing.
        absent = {name for name, p in self._engine.parts.named_parameters() if not p.requires_grad}.difference(*names)
        if names != [[name for name in group if name not in absent] for group in self._engine.bound.names]:
            what = f"The parameter groups in checkpoint {where} differ from those of the optimizer."
            raise CheckpointError("other-optimizer", what, fix=fix)

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        optimizer = self._engine.bound.optimizer
        self._engine.updater.forget_state()
        optimizer.state.clear()  # in place, because it may be shared
        copies, saved = self._engine.parts.tied_copies, _paths_by_parameter(tensors)
        for name, parameter in self._engine.parts.named_parameters():
            own = copies.get(name, name)
            for key, path in saved.get(own, {}).items():
                weight = f"model/{own}"
                optimizer.state[self._held(parameter)][key] = (
                    tensors[path].item()
                    if path.startswith("optimizer-values/")
                    else self._placed(key, tensors[path], parameter, _same_dtype(checkpoint, path, weight))
                )
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check it
        for group, other in zip(optimizer.param_groups, values["groups"], strict=True):
            # The switches are implementation choices of this run.
            group.update({key: value for key, value in other["settings"].items() if key not in SWITCHES})

    def _placed(self, key: str, value: Tensor, parameter: nn.Parameter, has_weights_dtype: bool) -> Tensor:
        """`value` on the device, in the memory format and with the placement that the optimizer expects."""
        optimizer, own = self._engine.bound.optimizer, local_shard(parameter)
        if key == "step":  # fused and capturable optimizers expect it on the device
            on_device = is_fused(optimizer) or any(group.get("capturable") for group in optimizer.param_groups)
            return value.to(own.device if on_device else "cpu", copy=True)
        if value.shape != own.shape:
            return value.to(own.device, copy=True)
        # Fused kernels require the strides of the parameter (channels_last).
        value = torch.empty_like(own, dtype=own.dtype if has_weights_dtype else value.dtype).copy_(value)
        return value if self._held(parameter) is not parameter else as_dtensor_like(parameter, value)


def _same_dtype(checkpoint: Checkpoint, path: str, other: str) -> bool:
    one, two = checkpoint.manifest.entry(path), checkpoint.manifest.entry(other)
    return one is not None and two is not None and one.dtype == two.dtype


def _paths_by_parameter(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """The paths of saved optimizer state, by parameter and key."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        kind, _, rest = path.partition("/")
        if kind in ("optimizer", "optimizer-values"):
            name, _, key = rest.rpartition("/")
            found.setdefault(name, {})[key] = path
    return found


def _number(value: bool | int | float) -> Tensor:
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype)
