"""The run folder: everything that a run leaves behind, in one place.

runs/gpt/            the first run of that name; the next ones are runs/gpt-2, runs/gpt-3, …
  config.yaml        the effective recipe
  derived.json       what followed from it on these ranks, with reasons
  metrics.jsonl      a line for each step and evaluation
  logs/rank-0.log    what each rank printed
  checkpoints/       weights and state
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import LaunchError

ROOT = Path("runs")


def create(name: str) -> Path:
    """A new folder for a run: `name` under runs/, or a path. One that exists is never written into."""
    wanted = Path(name)
    if len(wanted.parts) == 1:
        wanted = ROOT / wanted
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            # An empty folder of that name was made for this run by somebody; a new one is claimed by making it.
            if not _is_empty_folder(folder):
                folder.mkdir(parents=True)
            (folder / "logs").mkdir()
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise LaunchError(
                "run-folder",
                f"The run folder {folder} can't be made: {error.strerror or error}.",
                fix="set run: to a path that can be written, or run: false to write nothing",
            ) from None


def _is_empty_folder(folder: Path) -> bool:
    try:
        return not list(folder.iterdir())
    except OSError:
        return False


def rank_log(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank-{rank}.log"
