"""Starts that failed before their first step. The folder of one says why, until the next start of that name clears it.

A folder is kept if it holds a step, a checkpoint, or anything that is not ours; or the output of a script that ran for
a while without a run of a Trainer, as an evaluation does, of which nothing else is known.
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
    events = [] if _has_steps(folder) else ledger.events(folder)  # which may be long, after many steps
    names = [each["event"] for each in events]
    if "launched" not in names or _PROGRESS.intersection(names):
        return False
    if any(each["event"] == "ended" and not each.get("status") for each in events):
        return False
    if "opened" not in names and events[-1]["time"] - events[0]["time"] > _LONG_SECONDS:
        return False
    # Our launcher, which has logs, may be about to restart its ranks.
    is_launched, last = any(folder.logs.glob("*")), names[::-1][: names[::-1].index("launched")]
    is_free = is_locked or not folder.lock.exists() or not lock.look(folder)[0]
    has_ended = is_free and ("ended" if is_launched else "opened") in last
    return has_ended and not _holds_more(folder, has_trainer="opened" in names)


def _has_steps(folder: RunFolder) -> bool:
    has_records = folder.metrics.is_file() and folder.metrics.stat().st_size > 0
    return (
        has_records or any(folder.checkpoints.glob("*")) or any(beat.step for beat in heartbeat.read(folder).values())
    )


def _holds_more(folder: RunFolder, *, has_trainer: bool) -> bool:
    """Whether somebody else has written to the folder: without a Trainer, anything but the logs of the launcher."""
    ours = {folder.ledger, folder.lock, folder.logs, *(path for path in folder.files() if path.parent == folder.logs)}
    if has_trainer:
        ours |= {*folder.files(), *folder.folders}
        ours |= {*folder.tensorboard.glob("events.out.tfevents.*"), *folder.images.glob("*.png")}
    return any(path not in ours for path in folder.path.rglob("*"))


def cleared(folder: RunFolder) -> bool:
    """Empty the folder of a failed start, for the next one; False if it is something else."""
    held, is_mine = lock.RunLock(folder), False  # only one of several starts gets it
    with suppress(CheckpointError, OSError):
        if is_failed_start(folder):
            held.take()
            if is_failed_start(folder, is_locked=True):
                last = {folder.ledger: 1, folder.lock: 2}  # others must not take it for a failed start
                for path in sorted(folder.path.iterdir(), key=lambda path: last.get(path, 0)):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                folder.logs.mkdir()
                is_mine = True
    held.release()
    return is_mine
