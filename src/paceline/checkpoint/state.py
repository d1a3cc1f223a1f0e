"""The contents of a checkpoint: one list of entries, each saved and restored under its key.

    state = TrainingState([StateEntry("model", …), StateEntry("scaler", …)], rank=0, layout={"ranks": 1})
    snapshot = state.capture()           # on every rank: references, not copies
    loaded = state.read(checkpoint)      # every entry read and verified; nothing has changed yet
    state.apply(loaded)

The key of an entry is its name in the manifest's `state` and the prefix of its tensors (`<key>/…`), so checkpointing
another part only takes another entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import Checkpoint, read_tensors
from paceline.checkpoint.shard_file import require_dtype
from paceline.errors import CheckpointError
from paceline.runtime.serialization import from_json, to_json

REPLICAS = "replicas"  # above the paths of one replica's own state
_METADATA = "metadata"  # user-defined values, saved and read like an entry


class Stateful(Protocol):
    """A part with plain values and full tensors that are the same on every rank. Rank 0 saves it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class OptionalState:
    """A part that some runs do not have. It is saved as None, which leaves the part unchanged when loaded."""

    def __init__(self, part: Stateful | None) -> None:
        self._part = part

    def state_dict(self) -> Any:
        return None if self._part is None else self._part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._part is not None and state:
            self._part.load_state_dict(state)


@dataclass
class ShardedState:
    """The state of a sharded part on this rank."""

    tensors: dict[str, LocalShard] = field(default_factory=dict)  # by path: below `<key>/` or `<key>-<kind>/`
    volatile: set[str] = field(default_factory=set)  # paths, if the entry itself is not volatile
    aliases: dict[str, str] = field(default_factory=dict)  # other names of tensors, by path
    values: Any = None  # as JSON, saved under `value_key`


class ShardedStateful(ABC):
    """A part with tensors that may be sharded. Their names are those of the full model, for any layout."""

    value_key: str | None = None  # its name in the manifest's `state`; None if it has tensors only

    @abstractmethod
    def sharded_state(self) -> ShardedState: ...

    @abstractmethod
    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """The tensors to read, by path, with the sharding of this rank. Raises if the checkpoint does not match."""

    @abstractmethod
    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None: ...


@dataclass(frozen=True)
class StateEntry:
    """One part of the training state.

    The `state_dict` of a `per_rank` part contains tensors only. It is loaded on the layout it was saved with; on any
    other layout, `load_state_dict` gets an empty dict.
    """

    key: str
    part: Stateful | ShardedStateful
    scope: Literal["weights", "training"] = "training"  # "weights": also loaded with weights_only
    per_rank: bool = False  # every rank saves its own state
    volatile: bool = True  # a forward may change its tensors, so they are copied before the save returns
    if_absent: Literal["error", "keep"] = "error"  # "keep": leave the part unchanged


@dataclass
class Snapshot:
    """The training state on this rank, for a `Writer`."""

    tensors: dict[str, LocalShard] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metadata: Any = field(default_factory=dict)


@dataclass(frozen=True)
class ReplicaPlace:
    """Which of how many replicas this rank belongs to, if replicas have a state of their own: what differs between them
    is saved as their mean under its path, and besides for each replica."""

    number: int
    count: int

    def own(self, path: str) -> str:
        return f"{REPLICAS}/{self.number}/{path}"

    def source(self, path: str, manifest: Manifest) -> str | None:
        """Where to read a path: for the same number of replicas, what each had, None if nothing; otherwise the mean."""
        if manifest.layout.get("replicate") != self.count:
            return path
        saved = manifest.aliases.get(path, path)
        if self.own(saved) in manifest.tensors:
            return self.own(saved)
        others = (ReplicaPlace(number, self.count).own(saved) for number in range(self.count))
        return None if any(other in manifest.tensors for other in others) else path


@dataclass(frozen=True)
class LoadedState:
    """The verified contents of a checkpoint."""

    checkpoint: Checkpoint
    entries: Sequence[StateEntry]
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]  # by the entries' keys
    metadata: dict[str, Any]


class TrainingState:
    """The entries, in the order in which they are saved and applied."""

    def __init__(
        self,
        entries: Iterable[StateEntry],
        *,
        rank: int,
        layout: Mapping[str, Any],
        replica: ReplicaPlace | None = None,
    ) -> None:
        self.entries = tuple(entries)
        self._rank, self._layout, self._replica = rank, dict(layout), replica
        keys = [entry.key for entry in self.entries]
        assert len({*keys, _METADATA}) == len(keys) + 1, f"two entries have the same key: {keys}"

    def capture(self, metadata: Mapping[str, Any] | None = None, *, without: Collection[str] = ()) -> Snapshot:
        """Collect references, not copies. `without` lists keys to leave out."""
        snapshot, found = Snapshot(), dict[str, Tensor]()
        chosen = [entry for entry in self.entries if entry.key not in without]
        for entry in (entry for entry in chosen if not entry.per_rank):
            self._capture(entry, snapshot)
        snapshot.metadata = to_json(dict(metadata or {}), _METADATA, found)
        self._add(snapshot, found)
        for entry in (entry for entry in chosen if entry.per_rank):  # after the entries that ranks have in common
            self._capture(entry, snapshot)
        for path, shard in snapshot.tensors.items():
            require_dtype(path, shard.local.dtype)
        return snapshot

    def _capture(self, entry: StateEntry, snapshot: Snapshot) -> None:
        part, tensors = entry.part, dict[str, Tensor]()
        if isinstance(part, ShardedStateful):
            state = part.sharded_state()
            snapshot.tensors |= state.tensors
            snapshot.volatile |= set(state.tensors) if entry.volatile else state.volatile
            snapshot.aliases |= state.aliases
            if part.value_key is not None:
                snapshot.values[part.value_key] = state.values
        elif entry.per_rank:
            prefix = self._own_prefix(entry)
            self._add(snapshot, {prefix + name: each for name, each in part.state_dict().items()}, entry)
        else:
            snapshot.values[entry.key] = to_json(part.state_dict(), entry.key, tensors)
            self._add(snapshot, tensors, entry)

    def _add(self, snapshot: Snapshot, tensors: Mapping[str, Tensor], entry: StateEntry | None = None) -> None:
        if self._rank and not (entry is not None and entry.per_rank):
            return  # saved by rank 0
        snapshot.tensors |= {path: LocalShard(tensor) for path, tensor in tensors.items()}
        if entry is None or entry.volatile:
            snapshot.volatile |= set(tensors)

    def _own_prefix(self, entry: StateEntry) -> str:
        return f"{entry.key}/rank-{self._rank}/"

    def read(self, checkpoint: Checkpoint, *, weights_only: bool = False, without: Collection[str] = ()) -> LoadedState:
        """Read and verify this rank's part of every entry. Apply it only after every rank has succeeded."""
        manifest = checkpoint.manifest
        chosen = [entry for entry in self.entries if entry.scope == "weights" or not weights_only]
        entries = [entry for entry in chosen if entry.key not in without and _is_in(checkpoint, entry)]
        targets: dict[str, Tensor] = {}
        for entry in entries:
            targets = {**self._targets(entry, checkpoint), **targets}  # earlier entries take precedence
        targets |= targets_below(manifest, _METADATA)
        place = None if weights_only else self._replica
        sources = {path: path if place is None else place.source(path, manifest) for path in targets}
        found = {path: source for path, source in sources.items() if source is not None}
        read = read_tensors(checkpoint, {source: targets[path] for path, source in found.items()})
        tensors = {path: read[source] for path, source in found.items()}
        values = {
            entry.key: from_json(manifest.state.get(key), tensors.__getitem__)
            for entry in entries
            if (key := _value_key(entry)) is not None
        }
        metadata = from_json(manifest.metadata, tensors.__getitem__)
        return LoadedState(checkpoint, entries, tensors, values, metadata)

    def _targets(self, entry: StateEntry, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        if isinstance(entry.part, ShardedStateful):
            return entry.part.read_targets(checkpoint)
        # Rank 0 also verifies the state of ranks that no longer exist.
        own_only = entry.per_rank and self._rank != 0
        return targets_below(checkpoint.manifest, self._own_prefix(entry)[:-1] if own_only else entry.key)

    @torch.no_grad()
    def apply(self, loaded: LoadedState) -> None:
        """Load what `read` returned into the parts."""
        for entry in loaded.entries:
            part = entry.part
            if isinstance(part, ShardedStateful):
                part.load_sharded_state(loaded.checkpoint, loaded.tensors, loaded.values.get(entry.key))
            elif entry.per_rank:
                part.load_state_dict(self._own(entry, loaded))
            else:
                part.load_state_dict(loaded.values[entry.key])

    def _own(self, entry: StateEntry, loaded: LoadedState) -> dict[str, Tensor]:
        if loaded.checkpoint.manifest.layout != self._layout:
            return {}
        prefix = self._own_prefix(entry)
        return {path.removeprefix(prefix): each for path, each in loaded.tensors.items() if path.startswith(prefix)}


def targets_below(manifest: Manifest, key: str) -> dict[str, Tensor]:
    """The full tensors of a key."""
    return {
        path: torch.empty(entry.shape, device="meta")
        for path, entry in manifest.tensors.items()
        if path == key or path.startswith(f"{key}/")
    }


def _value_key(entry: StateEntry) -> str | None:
    if isinstance(entry.part, ShardedStateful):
        return entry.part.value_key
    return None if entry.per_rank else entry.key


def _is_in(checkpoint: Checkpoint, entry: StateEntry) -> bool:
    """Whether a checkpoint has an entry; raises if a required one is missing. Parts with only sharded tensors check
    this themselves."""
    key = _value_key(entry)
    manifest = checkpoint.manifest
    if key in manifest.state if key is not None else targets_below(manifest, entry.key):
        return True
    if entry.if_absent == "keep":
        return False
    if key is None and isinstance(entry.part, ShardedStateful):
        return True
    raise CheckpointError(
        "other-format", f"Checkpoint {checkpoint.at} has an unsupported format: no state of {entry.key}."
    )
