"""Every state that a crash can leave a disk in, from the operations of a save: the model, in memory.

What a crash may do to operations that were not synced, after ALICE (OSDI '14) and CrashMonkey (OSDI '18), and meant
to be weaker than journalling file systems; disks that lie about a sync are not in it:

- A file's bytes that were written after its last sync may be there, be missing, end anywhere, or be zero in any of
  their 512-byte blocks, whatever the folder says.
- A folder's entries (new names, renames, swaps, removals) that came after its last sync may each be there or not, in
  any combination, except that what happened to one name happened in order: a rename of a folder does not survive
  without the making of it. Other folders' entries are independent, so a file may be unlinked in a folder whose own
  rename was lost.
- To sync a file does not sync its name, to sync a folder does not sync the files in it.
- One rename, one exchange and one unlink are atomic.

`States` plays the operations up to some point; `.crash(choose)` makes one state: a dict of paths to bytes, None for a
folder. `everything` is the state after the process alone was killed, `nothing_unsynced` keeps what was promised only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disks import Operation

_BLOCK = 512
State = dict[str, bytes | None]


@dataclass
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[tuple[Operation, _File | _Folder | None]] = field(default_factory=list)


class Choice:
    """Which of what was not synced survives."""

    def keeps(self) -> bool:
        raise NotImplementedError

    def bytes(self, synced: bytes, written: bytes) -> bytes:
        raise NotImplementedError


class Everything(Choice):
    def keeps(self) -> bool:
        return True

    def bytes(self, synced: bytes, written: bytes) -> bytes:
        return written


class NothingUnsynced(Choice):
    def keeps(self) -> bool:
        return False

    def bytes(self, synced: bytes, written: bytes) -> bytes:
        return synced


class AnyOf(Choice):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._share = self._random.choice((0.15, 0.5, 0.85))

    def keeps(self) -> bool:
        return self._random.random() < self._share

    def bytes(self, synced: bytes, written: bytes) -> bytes:
        kind = self._random.randrange(4)
        if written == synced or kind == 0:
            return written
        if kind == 1:
            return synced
        end = self._random.randint(len(synced), len(written))
        if kind == 2:
            return written[:end]
        torn = bytearray(written)
        for at in range(len(synced), len(written), _BLOCK):
            if self._random.random() < 0.5:
                last = min(at + _BLOCK, len(written))
                torn[at:last] = bytes(last - at)
        return bytes(torn)


def snapshot(root: Path) -> State:
    paths = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


def rebuild(state: State, root: Path) -> None:
    root.mkdir(parents=True)
    for name in sorted(state):
        data = state[name]
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


class States:
    """A disk that held `before`, all of it synced, and then saw operations below `root`."""

    def __init__(self, root: Path, before: State) -> None:
        self._root = root
        self._top = _Folder()
        for name in sorted(before):
            data = before[name]
            parent, last = self._parent(root / name)
            parent.entries[last] = _Folder() if data is None else _File(data, data)
        _sync_all(self._top)

    def _folder(self, path: Path) -> _Folder:
        here: _File | _Folder = self._top
        for part in path.relative_to(self._root).parts:
            assert isinstance(here, _Folder)
            here = here.entries[part]
        assert isinstance(here, _Folder)
        return here

    def _parent(self, path: Path) -> tuple[_Folder, str]:
        return self._folder(path.parent), path.name

    def _file(self, path: Path) -> _File:
        parent, name = self._parent(path)
        file = parent.entries[name]
        assert isinstance(file, _File)
        return file

    def play(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self._play(operation)

    def _play(self, operation: Operation) -> None:
        if operation.kind == "write":
            self._file(operation.path).data += operation.data
        elif operation.kind == "sync":
            file = self._file(operation.path)
            file.synced = file.data
        elif operation.kind == "sync_folder":
            folder = self._folder(operation.path)
            folder.synced = dict(folder.entries)
            folder.pending.clear()
        elif operation.kind != "close":
            if operation.other is not None:
                assert operation.other.parent == operation.path.parent
            parent, _ = self._parent(operation.path)
            new = {"create": _File, "make_folder": _Folder}.get(operation.kind)
            made = None if new is None else new()
            parent.pending.append((operation, made))
            _apply(parent.entries, operation, made)

    def crash(self, choice: Choice) -> State:
        state: State = {}
        _collect(self._top, "", choice, state)
        return state


def _sync_all(folder: _Folder) -> None:
    folder.synced = dict(folder.entries)
    for inner in folder.entries.values():
        if isinstance(inner, _Folder):
            _sync_all(inner)


def _apply(entries: dict[str, _File | _Folder], operation: Operation, made: _File | _Folder | None) -> None:
    name = operation.path.name
    if made is not None:
        entries[name] = made
    elif operation.kind == "rename":
        assert operation.other is not None
        entries[operation.other.name] = entries.pop(name)
    elif operation.kind == "exchange":
        assert operation.other is not None
        other = operation.other.name
        entries[name], entries[other] = entries[other], entries[name]
    else:
        del entries[name]


def _collect(folder: _Folder, path: str, choice: Choice, state: State) -> None:
    entries = dict(folder.synced)
    lost: set[str] = set()  # names for which an operation did not survive: later ones on them can't
    for operation, made in folder.pending:
        names = {operation.path.name} | ({operation.other.name} if operation.other else set())
        if names & lost or not choice.keeps():
            lost |= names
        else:
            _apply(entries, operation, made)
    for name, inner in entries.items():
        if isinstance(inner, _Folder):
            state[path + name] = None
            _collect(inner, f"{path}{name}/", choice, state)
        else:
            state[path + name] = choice.bytes(inner.synced, inner.data)
