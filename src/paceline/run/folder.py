"""The run folder: everything that a run leaves behind, in one place.

runs/gpt/            the first run of that name; the next ones are runs/gpt-2, runs/gpt-3, …
  config.yaml        the effective recipe
  derived.json       what followed from it on these ranks, with reasons
  metrics.jsonl      a line for each step and evaluation
  ledger.jsonl       where the minutes went (ledger.py)
  logs/rank-0.log    what each rank printed
  checkpoints/       weights and state
  .lock              who works in it now (run/lock.py)
"""

from __future__ import annotations

import os
import re
from itertools import count
from pathlib import Path

from paceline.errors import CheckpointError, LaunchError, did_you_mean

ROOT = Path("runs")


def create(name: str) -> Path:
    """A new folder for a run: `name` under runs/, or a path. One that exists is never written into."""
    wanted = _path(name)
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        if wanted.exists() and not wanted.is_dir():
            raise _refusal(wanted, "there is a file of that name")
        for number in count(1):
            folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            # An empty folder of that name was made for this run by somebody; a new one is claimed by making it.
            if _is_empty_folder(folder) or _made(folder):
                (folder / "logs").mkdir()
                return folder
    except OSError as error:
        raise _refusal(wanted, error.strerror or str(error)) from None
    raise AssertionError("counting never ends")


def run_at(path: str) -> Path | None:
    """The run folder at a path, which may also be that of its checkpoints; None where there is no run."""
    folder = Path(path).absolute()
    folder = folder.parent if folder.name == "checkpoints" else folder
    return folder if _holds_a_run(folder) else None


def require_there(path: str) -> None:
    """Something to resume from, looked for before anything is made."""
    if not Path(path).exists():
        runs = [
            short(each) for each in (Path(path).absolute().parent, ROOT) if each.is_dir() for each in each.iterdir()
        ]
        raise CheckpointError("missing", f"resume: there is nothing at {path}.", fix=did_you_mean(path, runs))


def newest(name: str) -> Path | None:
    """The last run folder that `create(name)` made and a run has begun in; None where there is none."""
    wanted = _path(name)
    if not wanted.parent.is_dir():
        return None
    runs = [path for path in wanted.parent.iterdir() if is_run_of(path, name) and _holds_a_run(path)]
    return max(runs, key=lambda path: int(path.name[len(wanted.name) + 1 :] or 1), default=None)


def newest_launch(name: str) -> Path | None:
    """The last folder that `create(name)` made, and that ranks were started with."""
    wanted = _path(name)
    found = wanted.parent.iterdir() if wanted.parent.is_dir() else ()
    launches = [path for path in found if is_run_of(path, name) and (path / "ledger.jsonl").is_file()]
    return max(launches, key=lambda path: int(path.name[len(wanted.name) + 1 :] or 1), default=None)


def name_of(folder: Path) -> str:
    """What `create` was asked for when it made this folder, as far as that can be told: a path without its number."""
    numbered = re.fullmatch(r"(.+)-\d+", folder.name)
    first = folder if numbered is None else folder.with_name(numbered[1])
    return str(first if first.is_dir() else folder)


def is_run_of(folder: Path, name: str) -> bool:
    """Whether a folder is one that `create(name)` makes."""
    wanted = _path(name)
    numbered = rf"{re.escape(wanted.name)}(-([2-9]|[1-9]\d+))?"
    return folder.parent == wanted.parent and re.fullmatch(numbered, folder.name) is not None


def _holds_a_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir()


def _path(name: str) -> Path:
    path = Path(name)
    if path.name in ("", ".."):
        raise _refusal(path, "that is no name for a folder")
    # Absolute, because a script may change its working folder while it runs.
    return (path if os.sep in name else ROOT / path).absolute()


def _refusal(folder: Path, reason: str) -> LaunchError:
    return LaunchError(
        "run-folder",
        f"The run folder {folder} can't be made: {reason}.",
        fix="set run: to a path that can be written, or run: false to write nothing",
    )


def _made(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _is_empty_folder(folder: Path) -> bool:
    try:
        return not list(folder.iterdir())
    except OSError:
        return False


def short(folder: str | Path) -> str:
    """The folder as a person in the working folder would write it."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def rank_log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"
