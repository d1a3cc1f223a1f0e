"""The launch's view of a run folder: the one that its ranks use, and where this node keeps their logs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.config.launch import LaunchSpec
from paceline.errors import PacelineError
from paceline.run import folder
from paceline.run.folder import RunFolder
from paceline.run.lock import require_free
from paceline.runtime import environment


@dataclass(frozen=True)
class RankLogs:
    """`folder` is where this node keeps its ranks' logs: in the run folder, or in a temporary one if the launch has no
    run folder or this node can't access it."""

    folder: RunFolder
    run: RunFolder | None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell ranks where their heartbeats belong, and about the run folder."""
        run = {} if self.run is None else {environment.RUN_FOLDER: str(self.run)}
        return {environment.LOG_FOLDER: str(self.folder), **run}

    def of_rank(self, rank: int) -> str:
        """The path of a rank's log for display; empty if the log is temporary."""
        return "" if self.run is None else folder.short(self.folder.rank_log(rank))


@contextmanager
def opened(spec: LaunchSpec) -> Iterator[RankLogs]:
    """The run folder of a launch: a new one or, for `resume`, an existing one, whose logs are appended to. Without a
    name, a temporary folder."""
    run, resume = spec.run, spec.resume
    if run is None:
        with temporary() as logs:
            yield logs
        return
    if resume not in (None, "auto"):
        folder.require_exists(str(resume))
    # A script may train in another folder; the folder of its launch then contains logs and a ledger that refers to it.
    newest = RunFolder.newest_launch(run) if spec.prior_starts else RunFolder.newest(run)
    resumed = newest if resume == "auto" else RunFolder.at(resume) if resume else None
    if resumed is not None:
        require_free(resumed)  # another job may be writing to its logs
        resumed.logs.mkdir(exist_ok=True)
        yield RankLogs(resumed, resumed)
        return
    created = RunFolder.create(run)
    try:
        yield RankLogs(created, created)
    except PacelineError:
        if _is_unused(created):  # no rank was started
            shutil.rmtree(created.path)
        raise


@contextmanager
def temporary() -> Iterator[RankLogs]:
    """Logs of a launch without a run folder, removed at its end."""
    with _temporary_folder() as made:
        yield RankLogs(made, None)


@contextmanager
def shared(run: str | None) -> Iterator[RankLogs]:
    """The logs of another node than the first: in the run folder, or in a temporary one if it can't write there."""
    shared_run = None if run is None else RunFolder(Path(run))
    if shared_run is not None and _can_log_to(shared_run):
        yield RankLogs(shared_run, shared_run)
        return
    with _temporary_folder() as made:
        yield RankLogs(made, shared_run)


def _can_log_to(run: RunFolder) -> bool:
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
    except OSError:  # this node has no such disk, or no permission to write there
        return False
    return True


@contextmanager
def _temporary_folder() -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="paceline-") as path:
        made = RunFolder(Path(path))
        made.logs.mkdir()
        yield made


def _is_unused(run: RunFolder) -> bool:
    """Whether the folder holds only what the launcher writes before it starts ranks."""
    files = [path for path in run.path.rglob("*") if not path.is_dir()]
    return all(path == run.ledger or path.stat().st_size == 0 for path in files)
