"""The state of what reduces gradients, as a part of a checkpoint.

    comm-state/rank-<r>/<path>       the `comm_state` of the user's hook: its tensors, and `values`, JSON as bytes

A `comm_state` is loaded on the same number of ranks only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import ShardedState, ShardedStateful, targets_below
from paceline.guard.hook_check import is_saved
from paceline.runtime.serialization import from_json, to_json
from paceline.train.engine import Engine

COMM_STATE = "comm-state"
_VALUES = "values"


class HookState(ShardedStateful):
    """The `comm_state` of the user's communication hook, if it has `state_dict` and `load_state_dict`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        hook = engine.comm_hook
        self._part = hook.state if hook is not None and is_saved(hook) and engine.world.size > 1 else None

    @property
    def _own_prefix(self) -> str:
        return _prefix(COMM_STATE, self._engine.world.rank_info.rank)

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
