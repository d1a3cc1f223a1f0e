"""Where a launch leaves what it has to say: in the run folder, or nowhere."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launcher.launch import Launch
from paceline.run import folder
from paceline.run.lock import require_free
from paceline.runtime import environment


@dataclass(frozen=True)
class RankLogs:
    """The folder of the ranks' logs, and the run folder that it is in, if there is one."""

    path: Path
    run: Path | None

    @property
    def environment(self) -> dict[str, str]:
        """Through which ranks learn of the run folder."""
        return {} if self.run is None else {environment.RUN_FOLDER: str(self.run)}

    def of_rank(self, rank: int) -> str:
        """Where a person finds that rank's log; nothing where it will be gone."""
        return "" if self.run is None else folder.short(folder.rank_log(self.path, rank))


@contextmanager
def opened(launch: Launch) -> Iterator[RankLogs]:
    """The run folder of that name, a new one, or for `resume` the one that is gone on with, whose logs grow. Without a
    name everything is gone in the end."""
    run, resume = launch.run, launch.resume
    if run is None:
        with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
            yield RankLogs(Path(temporary), None)
        return
    if resume not in (None, "auto"):
        folder.require_there(str(resume))
    # A script may train in a folder of its own: then that of its launch holds logs and the ledger, which names it.
    newest = folder.newest_launch(run) if launch.restarted else folder.newest(run)
    gone_on = newest if resume == "auto" else folder.run_at(resume) if resume else None
    if gone_on is not None:
        require_free(gone_on)  # another job's logs are none of ours
        logs = gone_on / "logs"
        logs.mkdir(exist_ok=True)
        yield RankLogs(logs, gone_on)
        return
    made = folder.create(run)
    try:
        yield RankLogs(made / "logs", made)
    except PacelineError:
        if _holds_nothing(made):  # no rank was started
            shutil.rmtree(made)
        raise


def _holds_nothing(run: Path) -> bool:
    """Whether nothing is in it but what the launcher puts there before ranks start."""
    files = [path for path in run.rglob("*") if not path.is_dir()]
    return all(path.name == "ledger.jsonl" or path.stat().st_size == 0 for path in files)


@contextmanager
def shared(run: str | None) -> Iterator[RankLogs]:
    """The logs of a node whose first node has opened a run folder: beside that one's, or, where this machine does not
    see it, under the same path here."""
    path = None if run is None else Path(run) / "logs"
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            yield RankLogs(path, path.parent)
            return
    except OSError:
        pass  # no such disk here, or no right to write there
    with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
        yield RankLogs(Path(temporary), path.parent if path else None)
