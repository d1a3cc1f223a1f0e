"""What a rank says of its own end: a record that it leaves beside its log. What of all that is the cause: cause.py."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from paceline import errors
from paceline.errors import LaunchError, PacelineError
from paceline.run.folder import rank_log

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class FailureRecord:
    """What one rank says of its end."""

    rank: int
    time: float
    exit_code: int
    text: str  # the traceback, or for an error with a code its text
    error: dict[str, str] | None = None  # the parts of an error with a code

    def write(self, folder: Path) -> None:
        path = _path(folder, self.rank)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(path)

    def as_error(self) -> PacelineError:
        """The rank's own coded error again, or one that carries its traceback."""
        if self.error is not None:
            again = error_of(self.error)
            again.add_note(f"on rank {self.rank}")
            return again
        return LaunchError("rank-failed", f"Rank {self.rank} failed:\n{self.text.rstrip()}")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def parts_of(error: PacelineError) -> dict[str, str]:
    """An error with a code as plain values, for another process."""
    family, name = error.code.split(".", 1)
    return {"family": family, "name": name, "what": error.what, "why": error.why, "fix": error.fix}


def error_of(parts: Mapping[str, str]) -> PacelineError:
    """The error that another process raised."""
    family = next((kind for kind in PacelineError.__subclasses__() if kind.family == parts["family"]), LaunchError)
    return family(parts["name"], parts["what"], why=parts["why"], fix=parts["fix"])


def describe(error: BaseException, rank: int) -> FailureRecord:
    """A failure record for an exception that ended a rank."""
    now = time.time()
    if isinstance(error, PacelineError):
        return FailureRecord(rank, now, 1, str(error), parts_of(error))
    text = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))
    return FailureRecord(rank, now, 1, text)


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first line on: how the launcher got there helps nobody."""
    ours = (str(Path(errors.__file__).parent / "launcher"), "<frozen runpy>", "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def read(folder: Path) -> dict[int, FailureRecord]:
    """What ranks have said of their ends, by rank."""
    records = [FailureRecord(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    return {record.rank: record for record in records}


def log_sizes(folder: Path) -> dict[int, int]:
    """How much each rank's log holds."""
    found = {path.stem.removeprefix("rank-"): path for path in folder.glob("rank-*.log")}
    return {int(rank): path.stat().st_size for rank, path in found.items() if rank.isdecimal()}


def tail(folder: Path, rank: int, lines: int = 20, since: int = 0) -> str:
    """The last lines that a rank printed, behind the first `since` bytes."""
    try:
        with rank_log(folder, rank).open("rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def forget(folder: Path, ranks: Sequence[int], *, everything: bool) -> None:
    """What is found here later is of the start that comes now. Other nodes may write into the same folder at this very
    moment; what is of no rank of theirs (`everything`: of none behind these) is left of a larger world."""
    for pattern in ("failure-*.json", "progress-*", "suspects-*.json"):
        for path in folder.glob(pattern):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal() and (int(number) in ranks or (everything and int(number) > max(ranks))):
                path.unlink(missing_ok=True)


def first_coded(folder: Path) -> FailureRecord | None:
    """The first error with a code that a rank left, if any: after an interrupt others are mere consequences."""
    return min((record for record in read(folder).values() if record.error), key=lambda each: each.time, default=None)
