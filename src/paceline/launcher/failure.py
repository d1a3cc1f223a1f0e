"""Why a rank ended: each rank that fails leaves a record, and the earliest of them is the cause."""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from paceline import errors
from paceline.errors import LaunchError, PacelineError


@dataclass(frozen=True)
class Failure:
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
            family = next(
                (kind for kind in PacelineError.__subclasses__() if kind.family == self.error["family"]),
                LaunchError,
            )
            again = family(self.error["name"], self.error["what"], why=self.error["why"], fix=self.error["fix"])
            again.add_note(f"on rank {self.rank}")
            return again
        return LaunchError("rank-failed", f"Rank {self.rank} failed:\n{self.text.rstrip()}")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def describe(error: BaseException, rank: int) -> Failure:
    """A failure record for an exception that ended a rank."""
    now = time.time()
    if isinstance(error, PacelineError):
        family, name = error.code.split(".", 1)
        parts = {"family": family, "name": name, "what": error.what, "why": error.why, "fix": error.fix}
        return Failure(rank, now, 1, str(error), parts)
    text = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))
    return Failure(rank, now, 1, text)


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first line on: how the launcher got there helps nobody."""
    ours = (str(Path(errors.__file__).parent / "launcher"), "<frozen runpy>", "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def first_failure(folder: Path, exit_codes: dict[int, int]) -> Failure:
    """The failure that came first, given the exit codes of ranks that had failed before the others were ended.

    One of them that left no record was ended by a signal, or left without a word: those that did leave one failed
    because it was gone. Else the earliest record counts.
    """
    records = [Failure(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    silent = set(exit_codes) - {record.rank for record in records}
    if records and not silent:
        return min(records, key=lambda record: record.time)
    rank = min(silent, default=0)
    code = exit_codes.get(rank, 1)
    return Failure(rank, time.time(), code, f"rank {rank} ended with {_cause(code)}, without a traceback\n")


def forget_failures(folder: Path) -> None:
    """Those of an earlier start: what is found here later is of this one."""
    for path in folder.glob("failure-*.json"):
        path.unlink()


def first_coded(folder: Path) -> Failure | None:
    """The first error with a code that a rank left, if any: after an interrupt others are mere consequences."""
    records = [Failure(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    return min((record for record in records if record.error), key=lambda record: record.time, default=None)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def exit_status(failure: Failure) -> int:
    """For a shell: the rank's own status, or 128 + signal."""
    return 128 - failure.exit_code if failure.exit_code < 0 else failure.exit_code


class Failed(Exception):
    """A launch that ended because a rank failed; carries the first failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure
