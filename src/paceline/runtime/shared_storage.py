"""Whether every rank sees the run folder: on several nodes it may lie on a disk that only the first one has.

elsewhere = without_access(folder)        # on all ranks, once, after the first one made the folder
if elsewhere: ...                 # these ranks can neither write there nor read what lies there
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from paceline.errors import LaunchError
from paceline.runtime import collectives
from paceline.runtime.rank_errors import run_on_first_rank

# A network disk may go on saying for a while that a new file is not there.
_TRIES = 3
_SECONDS_BETWEEN_TRIES = 1.0


def ranks_without_access(folder: Path) -> list[int]:
    """The ranks that can't use the first rank's folder, equal on all ranks. A matter of all of them.

    The first rank puts a file with a random word there: a folder of the same name on another disk does not count.
    """
    probe = run_on_first_rank(lambda: _put(folder.absolute()), lambda reason: _not_writable(folder.absolute(), reason))
    path = Path(probe["folder"]) / probe["name"]
    answers = collectives.all_gather_object(_sees(path, probe["word"]))
    if collectives.is_main():
        path.unlink(missing_ok=True)
    return [rank for rank, seen in enumerate(answers) if not seen]


def _put(folder: Path) -> dict[str, str]:
    word = secrets.token_hex(16)
    probe = {"folder": str(folder), "name": f".probe-{word[:8]}", "word": word}
    (folder / probe["name"]).write_text(word)
    return probe


def _not_writable(folder: Path, reason: str) -> LaunchError:
    return LaunchError(
        "run-folder",
        f"The run folder {folder} can't be written: {reason}.",
        fix="set run: to a path that can be written, or run: false to write nothing",
    )


def _sees(path: Path, word: str) -> bool:
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            if path.read_text() == word:
                return os.access(path.parent, os.W_OK)
        except OSError:
            continue
    return False
