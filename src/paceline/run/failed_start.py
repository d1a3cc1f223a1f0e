"""Starts that failed before their first step. The folder of one says why, until the next start of that name clears it.

A folder is kept if it holds a step, a checkpoint, or anything that is not ours; or the output of a script without a
Trainer that ran for a while, of which nothing else is known.
"""

from __future__ import annotations

import shutil
from contextlib import suppress

from paceline.errors import CheckpointError
from paceline.run import heartbeat, ledger, lock
from paceline.run.folder import RunFolder

_PROGRESS = {"first-step", "stepped", "saved", "finished"}
_LONG_SECONDS = 300.0


def is_failed_start(folder: RunFolder, *, is_locked: bool = False) -> bool:
    """Whether all starts in this folder have ended before a first step. `is_locked`: by the caller."""
    events = [] if _holds_more(folder) else ledger.events(folder)  # which may be long, after many steps
    names = [each["event"] for each in events]
    if "launched" not in names or _PROGRESS.intersection(names):
        return False
    if any(each["event"] == "ended" and not each.get("status") for each in events):
        return False
    if "joined" not in names and events[-1]["time"] - events[0]["time"] > _LONG_SECONDS:
        return False
    # Our launcher, which has logs, may be about to restart its ranks.
    is_launched, last = any(folder.logs.glob("*")), names[::-1][: names[::-1].index("launched")]
    is_free = is_locked or not folder.lock.exists() or not lock.look(folder)[0]
    return is_free and ("ended" if is_launched else "opened") in last


def _holds_more(folder: RunFolder) -> bool:
    ours = {path.name for path in (*folder.files(), *folder.folders)}
    kept = [*folder.checkpoints.glob("*"), *(each for each in folder.path.iterdir() if each.name not in ours)]
    has_records = folder.metrics.is_file() and folder.metrics.stat().st_size > 0
    return bool(kept) or has_records or any(beat.step for beat in heartbeat.read(folder).values())


def cleared(folder: RunFolder) -> bool:
    """Empty the folder of a failed start, for the next one; False if it is something else."""
    held, is_mine = lock.RunLock(folder), False  # only one of several starts gets it
    with suppress(CheckpointError, OSError):
        if is_failed_start(folder):
            held.take()
            if is_mine := is_failed_start(folder, is_locked=True):
                for path in sorted(folder.path.iterdir(), key=folder.lock.__eq__):  # the lock last
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                folder.logs.mkdir()
    held.release()
    return is_mine
