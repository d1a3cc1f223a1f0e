"""The folder of a launch gets the name that its script asks for.

A launcher opens logs before a Trainer says `run=`, in a folder that is named after the script. When the first Trainer
opens its run, what is in that folder moves there. Launchers and ranks, also those of other nodes, hold its path: until
the launch ends, it is a link to the run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count

from paceline.run import regular_files
from paceline.run.folder import RunFolder


def is_unclaimed(launch: RunFolder) -> bool:
    """Whether no Trainer has opened a run in it, nor given it another name."""
    ours = {launch.logs.name, launch.ledger.name}
    return (
        launch.path.is_dir() and not launch.path.is_symlink() and {each.name for each in launch.path.iterdir()} <= ours
    )


def move(launch: RunFolder, run: RunFolder) -> bool:
    """Move logs and ledger of a launch to the folder of its run. False if that is on another disk."""
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
        if run.path.stat().st_dev != launch.path.stat().st_dev:
            return False
        if any(run.logs.iterdir()):  # of an earlier start of the run
            names = (run.logs.with_name(f"{run.logs.name}-{number}") for number in count(1))
            run.logs.rename(next(name for name in names if not os.path.lexists(name)))
        launch.logs.rename(run.logs)
        with suppress(FileNotFoundError):  # another node has no ledger
            regular_files.append(run.ledger, regular_files.read_bytes(launch.ledger))
            launch.ledger.unlink()
        launch.path.rmdir()
        launch.path.symlink_to(run.path)
    except OSError:
        return False
    return True
