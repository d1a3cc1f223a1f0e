"""Whether every rank can access the run folder: on several nodes it may be on a local disk of the first one."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from paceline.run import regular_files
from paceline.run.folder import not_usable
from paceline.runtime import collectives
from paceline.runtime.rank_errors import run_on_first_rank

_ATTEMPTS, _SECONDS_BETWEEN_ATTEMPTS = 3, 1.0  # a new file may be invisible for a while on a network filesystem


def ranks_without_access(folder: Path) -> list[int]:
    """The ranks that can't read and write the folder of rank 0. Collective: must be called on every rank.

    Rank 0 writes a file with a random token, to detect a folder of the same name on another disk.
    """
    probe = run_on_first_rank(lambda: _write(folder.absolute()), lambda reason: not_usable(folder.absolute(), reason))
    path = Path(probe["path"])
    has_access = collectives.all_gather_object(_has_access(path, probe["token"]))
    if collectives.is_main():
        path.unlink(missing_ok=True)
    return [rank for rank, accessible in enumerate(has_access) if not accessible]


def _write(folder: Path) -> dict[str, str]:
    token = secrets.token_hex(16)
    path = folder / f".probe-{token[:8]}"
    regular_files.replace(path, token.encode())
    return {"path": str(path), "token": token}


def _has_access(path: Path, token: str) -> bool:
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        try:
            if regular_files.read_text(path) == token:
                return os.access(path.parent, os.W_OK)
        except OSError:
            continue
    return False
