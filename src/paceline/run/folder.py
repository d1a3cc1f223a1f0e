"""The run folder: everything that a run leaves on disk. The only module that spells the names of its files.

    folder = RunFolder.create("gpt")
    folder.metrics               # runs/gpt/metrics.jsonl
    folder.rank_log(3)           # runs/gpt/logs/rank-3.log

The first run named `gpt` is `runs/gpt`; the next ones are `runs/gpt-2`, `runs/gpt-3`, … A start that failed before its
first step uses up no name. A launch without a run folder keeps its logs in a temporary folder of the same layout.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, LaunchError, did_you_mean
from paceline.run import regular_files

ROOT = Path("runs")
CONFIG, METRICS = "config.yaml", "metrics.jsonl"  # also named in messages
LATEST, BEST = "latest", "best"  # in any folder of checkpoints
_PART = "trainer-"
_CHECKPOINTS, _LOGS, _EVENTS, _PROFILE, _TENSORBOARD = "checkpoints", "logs", "events", "profile", "tensorboard"
_IMAGES = "images"


@dataclass(frozen=True)
class RankFiles:
    """One file per rank: `files(3)` is the path for rank 3."""

    folder: Path
    name: str  # with a placeholder for the rank

    def __call__(self, rank: int) -> Path:
        return self.folder / self.name.format(rank)

    def existing(self) -> dict[int, Path]:
        """The files on disk, by rank."""
        prefix, suffix = re.split(r"{.*}", self.name)
        paths = self.folder.glob(f"{prefix}*{suffix}")
        found = {path.name.removeprefix(prefix).removesuffix(suffix): path for path in paths}
        return {int(rank): found[rank] for rank in sorted(found) if rank.isdecimal()}


class FolderFile:
    """Declares a file or folder in the folder of a run or a study."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, folder: Any, owner: object) -> Path:
        return Path(folder.path, *self._parts)


class _FilePerRank:
    """Declares a file that each rank has, in a folder of a run folder."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> RankFiles:
        return RankFiles(folder.path / self._folder, self._name)


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run folder. Creating an instance does not touch the disk."""

    path: Path

    config = FolderFile(CONFIG)  # the effective recipe
    derived = FolderFile("derived.json")  # values derived from it, with reasons
    environment = FolderFile("environment.json")  # versions, devices and command of the last start
    metrics = FolderFile(METRICS)  # one line per step and evaluation (jsonl.py)
    media = FolderFile("media.jsonl")  # one line per image, text and histogram that was logged (monitor/media.py)
    images = FolderFile(_IMAGES)  # PNG files
    ledger = FolderFile("ledger.jsonl")  # events of the launcher and of rank 0 (ledger.py)
    lock = FolderFile(".lock")  # held by the job that writes to the folder (lock.py)
    checkpoints = FolderFile(_CHECKPOINTS)  # one folder per checkpoint
    latest = FolderFile(_CHECKPOINTS, LATEST)  # the name of the newest checkpoint
    best = FolderFile(_CHECKPOINTS, BEST)  # the names of the best ones
    rank_stats = _FilePerRank(_EVENTS, "rank-{:05d}.jsonl")  # throughput and memory
    trace = _FilePerRank(_PROFILE, "rank-{:05d}.json")  # of the profiler
    profile_split = _FilePerRank(_PROFILE, "split-{:05d}.json")  # where the time of the profiled steps went
    report = FolderFile("report.html")  # a page about the run (tools/watch/report.py)

    logs = FolderFile(_LOGS)
    rank_log = _FilePerRank(_LOGS, "rank-{}.log")  # output
    heartbeat = _FilePerRank(_LOGS, "progress-{}")  # what the rank is doing (heartbeat.py)
    page = _FilePerRank(_LOGS, "page-{}")  # how far it has come (heartbeat.py)
    stack = _FilePerRank(_LOGS, "stack-{}.txt")  # of its main thread, written when its launcher asks for it
    suspects = _FilePerRank(_LOGS, "suspects-{}.json")  # its samples in a suspect step (heartbeat.py)
    failure = _FilePerRank(_LOGS, "failure-{}.json")  # why it exited (failures.py)
    failure_space = _FilePerRank(_LOGS, "failure-{}.reserved")  # disk space for that file
    hang = FolderFile(_LOGS, "hang.json")  # the last report of ranks that made no progress, and earlier ones
    target = FolderFile(_LOGS, "target.json")  # the program that ranks run in a new interpreter

    csv = FolderFile("metrics.csv")  # from here on, files of the loggers
    tensorboard = FolderFile(_TENSORBOARD)
    wandb_id = FolderFile("wandb.id")
    mlflow_id = FolderFile("mlflow.id")
    mlflow_database = FolderFile("mlflow.db")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_unclaimed(self) -> bool:
        """Whether it is that of a launch in which no Trainer has opened a run yet."""
        is_here = self.logs.is_dir() and not self.path.is_symlink()
        return is_here and {each.name for each in self.path.iterdir()} <= {_LOGS, self.ledger.name}

    def move_to(self, run: RunFolder) -> None:
        """Move logs and ledger of a launch to its run, whose name came later. Launchers and ranks, also those of other
        nodes, know this path: it is a link until the launch ends. Raises OSError, and changes nothing, if the run is on
        another disk, or if that has no links."""
        moved = RunFolder(run.path / f".{self.path.name}")
        self.path.rename(moved.path)
        try:
            self.path.symlink_to(run.path)
        except OSError:
            moved.path.rename(self.path)
            raise
        if run.logs.is_dir() and any(run.logs.iterdir()):  # of an earlier start
            numbers = count(1)
            run.logs.rename(next(path for n in numbers if not (path := run.path / f"{_LOGS}-{n}").exists()))
        moved.logs.rename(run.logs)
        regular_files.append(run.ledger, regular_files.read_bytes(moved.ledger))
        shutil.rmtree(moved.path)

    @property
    def current(self) -> RunFolder:
        """Where this folder is now, if `move_to` has moved it."""
        return RunFolder(Path(os.path.realpath(self.path))) if self.path.is_symlink() else self

    def part(self, number: int) -> RunFolder:
        """The folder in it of another Trainer of the same script, by its number among them."""
        return RunFolder(self.path / f"{_PART}{number}")

    @property
    def whole(self) -> RunFolder:
        """The run that this folder is a part of, or itself."""
        return RunFolder(self.path.parent) if re.fullmatch(rf"{_PART}\d+", self.path.name) else self

    @property
    def folders(self) -> list[Path]:
        """The folders in it that a run writes to."""
        return [self.path / name for name in (_CHECKPOINTS, _LOGS, _EVENTS, _PROFILE, _TENSORBOARD, _IMAGES)]

    def files(self) -> Iterator[Path]:
        """The files that a run writes, whether or not they exist; of those of ranks, only existing ones."""
        for name, declared in vars(RunFolder).items():
            if isinstance(declared, FolderFile):
                yield from {getattr(self, name)}.difference(self.folders)
            elif isinstance(declared, _FilePerRank):
                yield from getattr(self, name).existing().values()

    def image(self, name: str, step: int) -> Path:
        """Of the image that was logged under a name, which may contain anything, at a step."""
        readable = re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[:40]
        digest = zlib.crc32(name.encode("utf-8", "replace"))
        return self.images / f"{step:08d}-{readable}-{digest:08x}.png"

    @property
    def has_run(self) -> bool:
        """Whether a run has started in this folder."""
        return self.config.is_file() or self.checkpoints.is_dir()

    @property
    def short(self) -> str:
        """The path for display, relative to the working directory."""
        return short(self.current.path)

    @property
    def requested_name(self) -> str:
        """The name that `create` was called with, as far as it can be inferred: the path without its number."""
        numbered = re.fullmatch(r"(.+)-\d+", self.path.name)
        first = self.path if numbered is None else self.path.with_name(numbered[1])
        return str(first if first.is_dir() else self.path)

    def is_run_of(self, name: str) -> bool:
        """Whether `create(name)` could have created this folder."""
        wanted = path_of(name)
        numbered = rf"{re.escape(wanted.name)}(-([2-9]|[1-9]\d+))?"
        return self.path.parent == wanted.parent and re.fullmatch(numbered, self.path.name) is not None

    @classmethod
    def create(cls, name: str) -> RunFolder:
        """Create a new run folder: `name` under runs/, or a path. An existing run is never written to."""
        from paceline.run import failed_start  # which knows this module

        wanted = path_of(name)
        try:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            if wanted.exists() and not wanted.is_dir():
                raise not_usable(wanted, "a file of that name exists")
            for number in count(1):
                path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
                folder = cls(path)
                is_new = _created_now(path) or _is_empty_folder(path)  # an empty one was created for this run
                if (is_new and _created_now(folder.logs)) or failed_start.cleared(folder):
                    return folder
        except OSError as error:
            raise not_usable(wanted, error.strerror or str(error)) from None
        raise AssertionError("unreachable")

    @classmethod
    def at(cls, path: str) -> RunFolder | None:
        """The run folder at a path, which may also be that of its checkpoints; None if there is no run."""
        found = Path(path).absolute()
        folder = cls(found.parent if found.name == _CHECKPOINTS else found)
        return folder if folder.has_run else None

    @classmethod
    def newest(cls, name: str) -> RunFolder | None:
        """The last folder that `create(name)` created and in which a run has started; None if there is none."""
        return next(iter(existing_runs(name)), None)

    @classmethod
    def newest_launch(cls, name: str) -> RunFolder | None:
        """The last folder that `create(name)` created and for which ranks were launched; None if there is none."""
        return next((folder for folder in _created(name) if folder.ledger.is_file()), None)


def existing_runs(name: str) -> list[RunFolder]:
    """The folders that `create(name)` created and in which a run has started, newest first."""
    from paceline.run.failed_start import is_failed_start

    return [each for each in _created(name) if each.has_run and not is_failed_start(each)]


def require_exists(path: str, problem: str = "Nothing to resume") -> None:
    """Raise unless there is something to resume from, before anything is created."""
    if not Path(path).exists():
        runs = [
            short(each) for each in (Path(path).absolute().parent, ROOT) if each.is_dir() for each in each.iterdir()
        ]
        raise CheckpointError("missing", f"{problem}: {path} does not exist.", fix=did_you_mean(path, runs))


def checkpoint_folders(path: Path) -> list[Path]:
    """The folders that may hold checkpoints at a path: itself, that of the run, and those of the runs in it."""
    return [path, path / _CHECKPOINTS, *sorted(path.glob(f"*/{_CHECKPOINTS}"))]


def short(path: str | Path) -> str:
    """A path for display, relative to the working directory."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def path_of(name: str) -> Path:
    """The absolute path of a run by its name, which is below runs/, or by its path."""
    path = Path(name)
    if path.name in ("", ".."):
        raise not_usable(path, "invalid name")
    # Absolute, because a script may change its working directory while it runs.
    return (path if os.sep in name else ROOT / path).absolute()


def _created(name: str) -> list[RunFolder]:
    """Newest first."""
    wanted = path_of(name)
    folders = [RunFolder(path) for path in wanted.parent.iterdir()] if wanted.parent.is_dir() else []
    created = [folder for folder in folders if folder.is_run_of(name)]
    return sorted(created, key=lambda folder: -int(folder.path.name[len(wanted.name) + 1 :] or 1))


def not_usable(folder: Path, reason: str) -> LaunchError:
    """The error for a run folder that can't be created or written to."""
    return LaunchError("run-folder", f"Can't write to the run folder {folder}: {reason}.")


def _created_now(folder: Path) -> bool:
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
