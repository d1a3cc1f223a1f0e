"""The model, as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import ShardedState, ShardedStateful, targets_below
from paceline.errors import CheckpointError
from paceline.parallel.shards import local_shard
from paceline.run.folder import CONFIG
from paceline.runtime.serialization import to_json
from paceline.text import listed
from paceline.train.weights_view import WeightsView

if TYPE_CHECKING:
    from paceline.train.engine import Engine

Shape = tuple[int, ...]
_SHOWN = 20  # names in an error


class ModelState(ShardedStateful):
    """Weights, buffers and extra state. Tied weights are saved once, with aliases."""

    value_key = "extra"

    def __init__(self, engine: Engine, view: WeightsView) -> None:
        self._engine, self._view = engine, view

    def sharded_state(self) -> ShardedState:
        engine, state = self._engine, ShardedState()
        if unsaved := engine.parts.module.unsaved:
            engine.parts.module.unsaved = []  # said once
            engine.log.warning(
                f"the forward keeps {', '.join(unsaved[:4])} in plain attributes for the next one; they are not saved: "
                "a resumed run starts without them; register buffers, or implement get_extra_state"
            )
        trained = {id(p) for p in engine.parts.model.parameters() if p.requires_grad}
        modules = engine.parts.model.modules()
        # Modified by a forward (nn.Embedding's max_norm).
        renormed = {id(module.weight) for module in modules if getattr(module, "max_norm", None) is not None}
        paths: dict[int, str] = {}
        extra: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        copies = engine.parts.tied_copies
        is_first = (engine.mesh.data_rank if engine.mesh.local_replicas == 1 else engine.mesh.coords["shard"]) == 0
        for name, value in self._view.entries(keep_vars=True).items():
            path = f"model/{name}"
            if not isinstance(value, Tensor):
                extra[name] = to_json(value, f"model-extra/{name}", tensors)
                continue
            first = f"model/{copies[name]}" if name in copies else paths.setdefault(id(value), path)
            if first != path:
                state.aliases[path] = first
                continue
            if not isinstance(value, nn.Parameter) and not is_first:
                continue  # if ranks differ, the buffers of the first data rank (of a replica) are saved
            state.tensors[path] = shard_of(value)
            if id(value) not in trained or id(value) in renormed:
                state.volatile.add(path)
        state.tensors |= {path: LocalShard(tensor) for path, tensor in tensors.items()}
        state.volatile |= set(tensors)
        state.values = extra
        return state

    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        targets = {f"model/{name}": tensor for name, tensor in self._saved_names().items()}
        _require_same_model(checkpoint, targets, is_stage=self._engine.mesh.degrees.pipeline > 1)
        return targets | targets_below(checkpoint.manifest, "model-extra")

    def _saved_names(self) -> dict[str, Tensor]:
        """The model's tensors by their names in the checkpoint."""
        copies = self._engine.parts.tied_copies
        entries = self._view.entries(keep_vars=True)
        return {copies.get(name, name): tensor for name, tensor in entries.items() if isinstance(tensor, Tensor)}

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        """Load parameters and buffers in place, and everything else in the state dict (extra state, copies made by
        hooks) with the model's `load_state_dict`."""
        model = self._engine.parts.model
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        others = dict(values)
        for name, tensor in self._saved_names().items():
            if id(tensor) in own:
                local_shard(tensor).copy_(tensors[f"model/{name}"])
            else:
                others[name] = tensors[f"model/{name}"]
        if others:
            model.load_state_dict(others, strict=False)


def _require_same_model(checkpoint: Checkpoint, targets: Mapping[str, Tensor], *, is_stage: bool) -> None:
    manifest = checkpoint.manifest
    own = {path.removeprefix("model/"): tuple(tensor.shape) for path, tensor in targets.items()}
    names = [name for name in (*manifest.tensors, *manifest.aliases) if name.startswith("model/")]
    entries = {name.removeprefix("model/"): manifest.entry(name) for name in {*names, *targets}}
    saved = {name: tuple(entry.shape) for name, entry in entries.items() if entry is not None}
    require_same_names(str(checkpoint.at), own, saved, is_stage=is_stage)
    sources: dict[int, tuple[str, list[list[str]]]] = {}
    for path, tensor in targets.items():
        entry = manifest.entry(path)
        assert entry is not None
        hashes = [chunk.hashes for chunk in entry.chunks]
        first, expected = sources.setdefault(id(tensor), (path, hashes))
        if hashes != expected:
            raise other_model(
                str(checkpoint.at), f"{first} and {path} are tied in this model, but differ in the checkpoint"
            )


def require_same_names(source: str, own: Mapping[str, Shape], saved: Mapping[str, Shape], *, is_stage: bool) -> None:
    """Raise if names or shapes of the model's tensors differ from the saved ones. `is_stage`: the model has the names
    of its own modules only."""
    both = [name for name in own if name in saved]
    found = {
        "missing": [name for name in own if name not in saved],
        "unexpected": [] if is_stage else [name for name in saved if name not in own],
        "of another shape": [
            f"{name} {saved[name]} instead of {own[name]}" for name in both if saved[name] != own[name]
        ],
    }
    if any(found.values()):
        shown = (f"{kind}: {listed(sorted(names), _SHOWN)}" for kind, names in found.items() if names)
        raise other_model(source, "; ".join(shown))


def other_model(source: str, difference: str) -> CheckpointError:
    return CheckpointError(
        "other-model",
        f"{source} does not match the model: {difference}.",
        fix=f"build the model with the options it was saved with ({CONFIG} in the run folder)",
    )


def shard_of(tensor: Tensor, like: Tensor | None = None) -> LocalShard:
    """`like` is the parameter that the tensor belongs to: it may be sharded the same way without being a DTensor."""
    source = tensor if like is None else like
    # This blocks training, and entering no_grad in local_shard takes most of the time if nothing is sharded.
    local = local_shard(tensor) if isinstance(tensor, DTensor) else tensor
    if isinstance(source, DTensor) and local.shape == local_shard(source).shape:
        return LocalShard(local, source)
    return LocalShard(local)
