"""What reduces gradients, as a part of checkpoints:

    compression/replicated/<name>    what all ranks have in common: the factors of PowerSGD
    compression/rank-<r>/<name>      error feedback of each rank, by parameter
    comm-state/rank-<r>/<path>       the `comm_state` of the user's hook: its tensors, and `values`, JSON as bytes

On the ranks that saved it, a run continues with the same bits. On another number of ranks, each takes the mean of the
saved error feedback: its share in the mean over ranks, which is what remains to be applied, is the same. So do all
ranks if rank 0 saved alone, before it exited with an error. A `comm_state` is loaded on the same number of ranks only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import ShardedState, ShardedStateful, targets_below
from paceline.runtime.serialization import from_json, to_json
from paceline.text import plural
from paceline.train.checks.wrapped_model import is_saved
from paceline.train.engine import Engine

COMPRESSION, COMM_STATE = "compression", "comm-state"
_VALUES = "values"


class CompressionState(ShardedStateful):
    """The state of `sync.compress`. A checkpoint without it leaves no error feedback."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._own_prefix = engine, _prefix(COMPRESSION, engine.world.rank_info.rank)

    def sharded_state(self) -> ShardedState:
        compression, state = self._engine.compression, ShardedState()
        if compression is not None:
            common = {f"{COMPRESSION}/replicated/{name}": each for name, each in compression.replicated_state().items()}
            own = {self._own_prefix + name: each for name, each in compression.local_state().items()}
            state.tensors = {path: LocalShard(tensor) for path, tensor in {**common, **own}.items()}
        return state

    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        manifest, rank, ranks = checkpoint.manifest, self._engine.world.rank_info.rank, self._engine.world.size
        if self._engine.compression is None:
            return {}
        saved = _saved_ranks(manifest, COMPRESSION)
        # On another number of ranks, each reads the state of some, and their sums are added up.
        read = [rank] if _fits(manifest, saved, ranks) else saved[rank::ranks]
        targets = targets_below(manifest, f"{COMPRESSION}/replicated")
        for each in read:
            targets |= targets_below(manifest, _prefix(COMPRESSION, each)[:-1])
        return targets

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        engine, manifest = self._engine, checkpoint.manifest
        saved = _saved_ranks(manifest, COMPRESSION)
        if engine.compression is None:
            if saved and engine.world.size > 1:
                engine.log.info(
                    "sync: gradients are not compressed, so the error feedback in this checkpoint is discarded"
                )
            return
        if _fits(manifest, saved, engine.world.size):
            local = _below(tensors, self._own_prefix)
        else:
            local = self._mean(manifest, tensors, saved)
            if saved:
                engine.log.info(f"sync: ranks start from the mean error feedback of {plural(len(saved), 'saved rank')}")
        engine.compression.load(_below(tensors, f"{COMPRESSION}/replicated/"), local)

    def _mean(self, manifest: Manifest, tensors: Mapping[str, Tensor], saved: list[int]) -> dict[str, Tensor]:
        """The mean of what all ranks have read. Collective."""
        if not saved:
            return {}
        rank, ranks, device = self._engine.world.rank_info.rank, self._engine.world.size, self._engine.world.device
        mean = {}
        for path in sorted(targets_below(manifest, _prefix(COMPRESSION, saved[0])[:-1])):
            name = path.removeprefix(_prefix(COMPRESSION, saved[0]))
            parts = [tensors[_prefix(COMPRESSION, each) + name] for each in saved[rank::ranks]]
            entry = manifest.tensors[path]
            total = torch.zeros(entry.shape, dtype=torch.promote_types(entry.torch_dtype, torch.float32), device=device)
            for part in parts:
                total += part.to(device)
            torch_dist.all_reduce(total)
            mean[name] = total / len(saved)
        return mean


class HookState(ShardedStateful):
    """The `comm_state` of the user's communication hook, if it has `state_dict` and `load_state_dict`."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._own_prefix = engine, _prefix(COMM_STATE, engine.world.rank_info.rank)
        hook = engine.comm_hook
        self._part = hook.state if hook is not None and is_saved(hook) and engine.world.size > 1 else None

    def sharded_state(self) -> ShardedState:
        tensors: dict[str, Tensor] = {}
        if self._part is not None:
            values = to_json(self._part.state_dict(), self._own_prefix[:-1], tensors)
            encoded = bytearray(json.dumps(values).encode())
            tensors[self._own_prefix + _VALUES] = torch.frombuffer(encoded, dtype=torch.uint8)
        return ShardedState({path: LocalShard(tensor) for path, tensor in tensors.items()})

    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        return targets_below(checkpoint.manifest, self._own_prefix[:-1]) if self._can_load(checkpoint) else {}

    def _can_load(self, checkpoint: Checkpoint) -> bool:
        saved = _saved_ranks(checkpoint.manifest, COMM_STATE)
        return self._part is not None and _fits(checkpoint.manifest, saved, self._engine.world.size)

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        log, saved = self._engine.log, _saved_ranks(checkpoint.manifest, COMM_STATE)
        if self._part is not None and self._can_load(checkpoint):
            text = bytes(tensors[self._own_prefix + _VALUES].cpu().numpy())
            self._part.load_state_dict(from_json(json.loads(text), tensors.__getitem__))
        elif saved and self._part is None:
            log.info("comm_hook: none with a state, so the state of a hook in this checkpoint is discarded")
        elif saved:
            ranks = self._engine.world.size
            log.warning(f"comm_hook: its state was saved by {len(saved)} ranks, not {ranks}, and is not loaded")


def _prefix(key: str, rank: int) -> str:
    return f"{key}/rank-{rank}/"


def _saved_ranks(manifest: Manifest, key: str) -> list[int]:
    """The ranks whose own state is in a checkpoint."""
    parts = (path.split("/", 2) for path in manifest.tensors if path.startswith(f"{key}/rank-"))
    return sorted({int(part.removeprefix("rank-")) for _, part, _ in parts})


def _fits(manifest: Manifest, saved: list[int], ranks: int) -> bool:
    return manifest.layout.get("ranks") == ranks and saved == list(range(ranks))


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {path.removeprefix(prefix): each for path, each in tensors.items() if path.startswith(prefix)}
