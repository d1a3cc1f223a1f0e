"""The checkpoints folder: atomic commit, pointers, candidates and pruning.

    checkpoints/
      step-000100/  step-000200/  step-000300/
      latest                       the name of the last checkpoint, for users and other tools
      best                         the names of the best checkpoints, best first
      .step-000400.partial-1f2e/   in progress, or left behind by a save that was killed

A folder whose name starts with a dot is not a checkpoint. All others were renamed after they were complete and synced,
so at any time, even after a power failure, the folder contains either the old state or the new one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.filesystem import Filesystem, write_new
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import Checkpoint, open_checkpoint, verify
from paceline.errors import CheckpointError
from paceline.run import regular_files
from paceline.run.folder import BEST, LATEST

_HEADROOM = 1.05  # required free space, as a multiple of the bytes to write
POINTERS = (LATEST, BEST)
_LEFTOVERS = (".partial-", ".old-", ".gone-")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def unused_name(folder: Path) -> Path:
    """`folder`, with a number appended if it exists, as after resuming from an earlier step."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def create_partial(disk: Filesystem, target: Path, size: int, *, overwrite: bool = False) -> Path:
    """Create a folder next to `target` to write `size` bytes into."""
    if target.exists() and not overwrite:
        raise CheckpointError(
            "exists",
            f"{target} already exists.",
            why="existing checkpoints are not overwritten by default",
            fix="use another name, or pass overwrite=True to save_checkpoint",
        )
    if target.exists() and not (target / manifests.NAME).exists():
        raise CheckpointError(
            "exists",
            f"{target} already exists and is not a checkpoint.",
            why="overwrite=True replaces checkpoints only",
            fix="use another name, or remove it first",
        )
    _make_parents(disk, target.parent)
    needed, free = int(size * _HEADROOM), disk.free_bytes(target.parent)
    if 0 < free < needed:
        raise CheckpointError(
            "no-space",
            f"Not enough disk space for checkpoint {target}: {needed / 1e6:.3g} MB required, {free / 1e6:.3g} MB free.",
            fix="free some space, save to another disk, or lower keep",
        )
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    disk.make_folder(partial)
    return partial


def _make_parents(disk: Filesystem, folder: Path) -> None:
    if folder.is_dir():
        return
    _make_parents(disk, folder.parent)
    disk.make_folder(folder)
    disk.sync_folder(folder.parent)


def commit(disk: Filesystem, partial: Path, target: Path, manifest: Manifest, *, overwrite: bool = False) -> None:
    """Rename a complete folder to `target`. Durable when this returns."""
    try:
        body, digest = manifests.encode(manifest)
        _require_readable(len(body), manifest, target)
        write_new(disk, partial / manifests.NAME, body)
        write_new(disk, partial / manifests.DIGEST, digest)
        disk.sync_folder(partial)
        replaced = _publish(disk, partial, target, overwrite)
    except BaseException:
        try_to_remove(disk, partial)
        raise
    disk.sync_folder(target.parent)  # on failure keep the old one: the rename may be lost in a power failure
    if replaced is not None:
        try_to_remove(disk, replaced)


def _require_readable(length: int, manifest: Manifest, target: Path) -> None:
    limit = manifests.max_bytes(sum(file.bytes for file in manifest.files.values()))
    if length > limit:
        raise CheckpointError(
            "too-much-metadata",
            f"The manifest of {target} is too large: {length} bytes, the limit is {limit}.",
            why="metadata and callback state are stored in it as JSON",
            fix="store long lists of numbers as tensors",
        )


def _publish(disk: Filesystem, partial: Path, target: Path, overwrite: bool) -> Path | None:
    """Returns the new path of the checkpoint that was replaced, if any."""
    if not (overwrite and target.exists()):
        disk.rename(partial, target)
        return None
    if disk.exchange(partial, target):
        return partial
    # Between the two renames, `candidates` finds the old checkpoint under its temporary name.
    old = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    disk.rename(target, old)
    try:
        disk.rename(partial, target)
    except BaseException:
        disk.rename(old, target)
        raise
    return old


def try_to_remove(disk: Filesystem, path: Path) -> None:
    """Ignores errors: leftovers are removed when the run is next opened."""
    with suppress(OSError):
        disk.remove(path)


def write_pointer(disk: Filesystem, folder: Path, pointer: str, names: Collection[str]) -> None:
    """Write names into a pointer file, atomically."""
    partial = folder / f".{pointer}.partial-{secrets.token_hex(4)}"
    write_new(disk, partial, "".join(f"{name}\n" for name in names).encode())
    disk.rename(partial, folder / pointer)
    disk.sync_folder(folder)


def creation_time(folder: Path) -> str:
    """Now, or just after the latest checkpoint if the clock was set back, because checkpoints are sorted by it."""
    now = datetime.now(UTC)
    for name in read_pointer(folder, LATEST)[:1]:
        try:
            last = datetime.fromisoformat(open_checkpoint(folder / name).manifest.created)
            now = max(now, last + timedelta(microseconds=1))
        except (CheckpointError, ValueError, TypeError):
            continue
    return now.isoformat(timespec="microseconds")


def read_pointer(folder: Path, pointer: str) -> list[str]:
    """The names in a pointer file, best first; empty if there is none."""
    try:
        names = regular_files.read_text(folder / pointer).split()
    except OSError:
        return []
    return [name for name in names if Path(name).name == name]


def follow_pointer(path: Path, share: Callable[[str | None], str | None] = lambda name: name) -> Path:
    """The checkpoint that a pointer such as `checkpoints/best` names; any other path unchanged. `share` may return the
    name on another rank, as this one may not have access to the folder."""
    if path.name not in POINTERS:
        return path
    name = share(path.name if path.is_dir() else next(iter(read_pointer(path.parent, path.name)), None))
    if name is None:
        raise no_pointer(path)
    return path.with_name(name)


def no_pointer(path: Path) -> CheckpointError:
    best = "save_best was not set, or no evaluation has completed yet" if path.name == BEST else "nothing was saved yet"
    return CheckpointError(
        "no-pointer",
        f"{path} names no checkpoint.",
        why=best,
        fix="pass the folder of a checkpoint, or the run folder to use its newest one",
    )


def prune(disk: Filesystem, folder: Path, keep: int, keep_every: int | None) -> list[str]:
    """Remove all but the newest `keep`, the best, and multiples of `keep_every` steps. Returns the removed names."""
    best = set(read_pointer(folder, BEST))
    removed = []
    for found in [each for each in candidates(folder) if each.manifest is not None][keep:]:
        assert found.manifest is not None
        is_kept = keep_every is not None and found.manifest.step % keep_every == 0
        if found.folder.name not in best and not is_kept and found.folder.name.startswith("step-"):
            remove(disk, found.folder)
            removed.append(found.folder.name)
    return removed


def remove(disk: Filesystem, folder: Path) -> None:
    """Rename first, so that a partially removed checkpoint does not look corrupted."""
    gone = folder.with_name(f".{folder.name}.gone-{secrets.token_hex(4)}")
    disk.rename(folder, gone)
    disk.sync_folder(folder.parent)
    disk.remove(gone)


def remove_leftovers(disk: Filesystem, folder: Path) -> None:
    """Remove the leftovers of killed saves. Requires the run's lock, so that no other process is writing."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _is_only_copy(path):
            disk.rename(path, _original_name(path))
            disk.sync_folder(folder)
        elif path.name.startswith(".") and any(mark in path.name for mark in _LEFTOVERS):
            disk.remove(path)


def _is_only_copy(path: Path) -> bool:
    """Whether this is an overwritten checkpoint whose replacement was not committed."""
    return path.name.startswith(".") and ".old-" in path.name and not _original_name(path).exists()


def _original_name(moved: Path) -> Path:
    return moved.with_name(moved.name[1:].partition(".old-")[0])


@dataclass(frozen=True)
class StoredCheckpoint:
    """A folder that looks like a checkpoint. `manifest` is None if it can't be read."""

    folder: Path
    manifest: Manifest | None
    problem: CheckpointError | None = None


def candidates(folder: Path) -> list[StoredCheckpoint]:
    """The checkpoints in a folder, newest first. Checks file sizes, not hashes. Checkpoints without a readable manifest
    are sorted by modification time."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") and not _is_only_copy(path):
            continue
        looks = path.name.startswith("step-") or (path / manifests.NAME).exists()
        if path.is_dir() and not path.is_symlink() and looks:
            try:
                found.append(StoredCheckpoint(path, open_checkpoint(path).manifest))
            except CheckpointError as problem:
                found.append(StoredCheckpoint(path, None, problem))
    return sorted(found, key=_age, reverse=True)


def _age(found: StoredCheckpoint) -> tuple[str, int]:
    if found.manifest is not None:
        return (found.manifest.created, found.manifest.step)
    # The best guess: a copy may have changed the folder's modification time.
    return (datetime.fromtimestamp(found.folder.stat().st_mtime, UTC).isoformat(timespec="microseconds"), 0)


def verified(folder: Path, excluding: Path | None = None) -> Iterator[Checkpoint]:
    """The intact checkpoints in a folder, newest first, each fully verified."""
    for found in candidates(folder):
        if found.manifest is not None and found.folder != excluding:
            try:
                yield verify(found.folder)
            except CheckpointError:
                continue
