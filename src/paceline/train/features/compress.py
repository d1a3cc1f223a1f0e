"""What reduces the gradients of DDP in place of its all-reduce: compressed gradients (`sync.compress`), or the user's
communication hook. Chosen before DDP is built, which gets the hook.

A compression has a process group of its own. Its collectives follow each other in the background of a backward, in
which batch norms and the weight of a step are reduced as well: in one group, gloo might match those of different kinds.

In checkpoints:

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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import ShardedState, ShardedStateful, StateEntry, targets_below
from paceline.config.recipe import Config
from paceline.log import Log
from paceline.parallel.data_parallel import CommHook
from paceline.parallel.sync.compression import Compression, build_compression
from paceline.parallel.sync.exchange import Exchange
from paceline.plan.network_model import Traffic
from paceline.runtime import process_group
from paceline.runtime.process_group import World
from paceline.runtime.serialization import from_json, to_json
from paceline.text import format_sent, plural
from paceline.train.checks.wrapped_model import is_saved
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks

COMPRESSION, COMM_STATE = "compression", "comm-state"
_VALUES = "values"


@dataclass(frozen=True)
class Reduction:
    hook: CommHook | None = None  # None: DDP's own all-reduce
    compression: Compression | None = None  # what the hook is made of; None: it is the user's
    traffic: Traffic | None = None  # counts what is sent with `sync`

    @property
    def is_saved(self) -> bool:
        """Whether each rank has a state of its own."""
        return self.hook is not None and (self.compression is not None or is_saved(self.hook))

    def begin(self, module: nn.Module, config: Config, log: Log) -> None:
        """Name the parameters of the module that DDP wraps, and log what is saved."""
        compression, section = self.compression, config.sync
        if compression is None or section is None:
            return
        names: dict[Tensor, str] = {each: name.removeprefix("model.") for name, each in module.named_parameters()}
        compression.begin(names)
        trained = [parameter for parameter in names if parameter.requires_grad]
        sent = [compression.sent_bytes(parameter) for parameter in trained]
        compressed = sum(1 for few, parameter in zip(sent, trained, strict=True) if few < parameter.nbytes)
        total, dense = sum(sent), sum(parameter.nbytes for parameter in trained)
        rank = f" rank {section.rank}" if section.compress == "powersgd" else ""
        log.info(
            f"sync: {section.compress}{rank}: gradients take {format_sent(total)} instead of "
            f"{format_sent(dense)} ({dense / total:.1f} × less); {compressed} of {plural(len(trained), 'parameter')} "
            "compressed"
        )


def build(context: FeatureContext) -> Hooks:
    reduction, world, log = context.reduction, context.world, context.log
    compression = reduction.compression
    state = [
        StateEntry(COMPRESSION, CompressionState(compression, world, log)),
        StateEntry(COMM_STATE, HookState(reduction.hook, world, log)),
    ]
    if compression is None:
        return Hooks(name="compress", state=state)  # they recognize those of another run
    if context.bound.scaler.is_enabled():
        compression.scale = context.bound.scaler.current

    def restart() -> None:
        compression.load({}, {})

    return Hooks(name="compress", state=state, restart=restart)


def choose_reduction(config: Config, world: World, given: CommHook | None, log: Log) -> Reduction:
    """`given`: the user's hook, which excludes `sync`. Collective: must be called on every rank."""
    section, traffic = config.sync, None if config.sync is None or world.size == 1 else Traffic()
    if section is None or section.compress is None or section.every is not None:
        return Reduction(given, traffic=traffic)
    if world.size == 1:
        log.info(f"sync.compress: {section.compress} is not used, there is one rank")
        return Reduction(given, traffic=traffic)
    compression = build_compression(section, Exchange(process_group.new_group("gradients"), traffic))
    name = f"sync.compress: {section.compress}"
    return Reduction(CommHook(lambda state, bucket: state.reduce(bucket), compression, name), compression, traffic)


class CompressionState(ShardedStateful):
    """The state of `sync.compress`. A checkpoint without it leaves no error feedback."""

    def __init__(self, compression: Compression | None, world: World, log: Log) -> None:
        self._compression, self._world, self._log = compression, world, log
        self._own_prefix = _prefix(COMPRESSION, world.rank_info.rank)

    def sharded_state(self) -> ShardedState:
        compression, state = self._compression, ShardedState()
        if compression is not None:
            common = {f"{COMPRESSION}/replicated/{name}": each for name, each in compression.replicated_state().items()}
            own = {self._own_prefix + name: each for name, each in compression.local_state().items()}
            state.tensors = {path: LocalShard(tensor) for path, tensor in {**common, **own}.items()}
        return state

    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        manifest, rank, ranks = checkpoint.manifest, self._world.rank_info.rank, self._world.size
        if self._compression is None:
            return {}
        saved = _saved_ranks(manifest, COMPRESSION)
        # On another number of ranks, each reads the state of some, and their sums are added up.
        read = [rank] if _fits(manifest, saved, ranks) else saved[rank::ranks]
        targets = targets_below(manifest, f"{COMPRESSION}/replicated")
        for each in read:
            targets |= targets_below(manifest, _prefix(COMPRESSION, each)[:-1])
        return targets

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        manifest, ranks, log = checkpoint.manifest, self._world.size, self._log
        saved = _saved_ranks(manifest, COMPRESSION)
        if self._compression is None:
            if saved and ranks > 1:
                log.info("sync: gradients are not compressed, so the error feedback in this checkpoint is discarded")
            return
        if _fits(manifest, saved, ranks):
            local = _below(tensors, self._own_prefix)
        else:
            local = self._mean(manifest, tensors, saved)
            if saved:
                log.info(f"sync: ranks start from the mean error feedback of {plural(len(saved), 'saved rank')}")
        self._compression.load(_below(tensors, f"{COMPRESSION}/replicated/"), local)

    def _mean(self, manifest: Manifest, tensors: Mapping[str, Tensor], saved: list[int]) -> dict[str, Tensor]:
        """The mean of what all ranks have read. Collective."""
        if not saved:
            return {}
        rank, ranks, device = self._world.rank_info.rank, self._world.size, self._world.device
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

    def __init__(self, hook: CommHook | None, world: World, log: Log) -> None:
        self._ranks, self._log, self._own_prefix = world.size, log, _prefix(COMM_STATE, world.rank_info.rank)
        self._part = hook.state if hook is not None and is_saved(hook) and world.size > 1 else None

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
        return self._part is not None and _fits(checkpoint.manifest, saved, self._ranks)

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        log, saved = self._log, _saved_ranks(checkpoint.manifest, COMM_STATE)
        if self._part is not None and self._can_load(checkpoint):
            text = bytes(tensors[self._own_prefix + _VALUES].cpu().numpy())
            self._part.load_state_dict(from_json(json.loads(text), tensors.__getitem__))
        elif saved and self._part is None:
            log.info("comm_hook: none with a state, so the state of a hook in this checkpoint is discarded")
        elif saved:
            log.warning(f"comm_hook: its state was saved by {len(saved)} ranks, not {self._ranks}, and is not loaded")


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
