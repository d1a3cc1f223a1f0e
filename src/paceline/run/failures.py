"""Failure records: a rank that fails writes the reason next to its log. diagnose/cause.py finds the cause."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from paceline import errors
from paceline.errors import LaunchError, PacelineError
from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.run.user_frame import UserFrame, find_user_frame, is_user_file

_TAIL_BYTES = 1 << 16
_RESERVED_BYTES = 1 << 14
_MOVED = (
    "remove .cuda() and .to('cuda'): the Trainer moves the model and the batches to the device of its rank, which "
    "without a GPU is the CPU"
)
_HINTS = {  # part of torch's message → what to do
    "Torch not compiled with CUDA enabled": f"this torch is a CPU build; {_MOVED}",
    "Found no NVIDIA driver": f"this machine has no GPU; {_MOVED}",
    "No CUDA GPUs are available": f"no GPU is visible to this rank; {_MOVED}",
}
_CRASH_FRAMES = 5
_MAX_MESSAGE = 1000  # characters; the text has all of them
_DUMPED = re.compile(r' +File "(.+)", line \d+ in ')


@dataclass(frozen=True)
class FailureRecord:
    """Why one rank exited."""

    rank: int
    time: float
    exit_code: int
    text: str  # the traceback, or the message of an error with a code
    error: dict[str, str] | None = None  # the parts of an error with a code
    file: str = ""  # the line of the user's code, if any
    line: int = 0
    function: str = ""
    code_line: str = ""
    exception: str = ""  # its class
    message: str = ""

    def write(self, folder: RunFolder) -> None:
        """On a full disk, uses the space that `reserve` kept for it."""
        try:
            regular_files.replace(folder.failure(self.rank), json.dumps(asdict(self)).encode())
        except OSError:
            space = folder.failure_space(self.rank)
            short = replace(self, text=self.text[-_RESERVED_BYTES // 8 :])  # JSON has up to six bytes per character
            with os.fdopen(regular_files.open_descriptor(space, os.O_WRONLY), "wb") as file:
                file.write(json.dumps(asdict(short)).encode())
                file.truncate()
            space.replace(folder.failure(self.rank))
        release(folder, self.rank)

    @property
    def place(self) -> str:
        """`train.py:17, in main: trainer.train(data)`; empty if no code of the user was running."""
        return str(UserFrame(self.file, self.line, self.function, self.code_line)) if self.file else ""

    @property
    def log_text(self) -> str:
        """The text for the rank's log."""
        return f"{self.text.rstrip()}\n" + (f"  at: {self.place}\n" if self.place else "")

    def as_error(self) -> PacelineError:
        """The error with a code that the rank raised, or a `launch.rank-failed` with its traceback."""
        if self.error is not None:
            again = PacelineError.from_dict(self.error)
        else:
            again = LaunchError("rank-failed", f"Rank {self.rank} failed:\n{self.text.rstrip()}")
        again.add_note(f"on rank {self.rank}" + (f", at {self.place}" if self.place else ""))
        return again


def write(record: FailureRecord, folder: RunFolder, *, to_log: bool = False) -> None:
    """Write a record and, after it, the text in the rank's log: the record must be earlier than the failures that this
    one causes on other ranks. If that fails, write it to the screen, which is not on that disk."""
    try:
        record.write(folder)
        if to_log:
            regular_files.append(folder.rank_log(record.rank), record.log_text.encode(errors="replace"))
    except OSError as error:
        with suppress(OSError):
            sys.stderr.write(f"{record.log_text}This could not be written to {folder.logs}: {error.strerror}.\n")


def reserve(folder: RunFolder, rank: int) -> str:
    """Keep disk space for the record of a rank. Returns why that failed, or an empty string."""
    try:
        regular_files.replace(folder.failure_space(rank), b" " * _RESERVED_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def release(folder: RunFolder, rank: int) -> None:
    with suppress(OSError):
        folder.failure_space(rank).unlink(missing_ok=True)


def describe(error: BaseException, rank: int) -> FailureRecord:
    """The failure record for an exception that a rank raised."""
    now, frame = time.time(), find_user_frame(error)
    place = ("", 0, "", "") if frame is None else (frame.file, frame.line, frame.function, frame.code)
    if isinstance(error, PacelineError):
        return FailureRecord(rank, now, 1, str(error), error.to_dict(), *place, error.code, error.what)
    if isinstance(error, SystemExit):
        code = exit_code(error)
        words = f": {error.code}" if isinstance(error.code, str) else ""
        return FailureRecord(rank, now, code, f"rank {rank} called sys.exit({code}){words}\n", None, *place)
    text = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))
    text += "".join(f"paceline: {hint}\n" for sign, hint in _HINTS.items() if sign in str(error))
    return FailureRecord(rank, now, 1, text, None, *place, type(error).__name__, str(error)[:_MAX_MESSAGE])


def exit_code(request: SystemExit) -> int:
    """Like the interpreter: None is 0, an int is itself, anything else is 1."""
    if request.code is None:
        return 0
    return request.code & 0xFF if isinstance(request.code, int) else 1


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on, without the launcher's frames."""
    ours = (str(Path(errors.__file__).parent / "launcher"), "<frozen runpy>", "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def read(folder: RunFolder) -> dict[int, FailureRecord]:
    """All failure records, by rank."""
    found = {}
    for rank, path in folder.failure.existing().items():
        with suppress(OSError, ValueError, TypeError, RecursionError):
            found[rank] = FailureRecord(**json.loads(regular_files.read_bytes(path)))
    return found


def first_coded(folder: RunFolder) -> FailureRecord | None:
    """The earliest record of an error with a code, if any: after an interrupt, later ones are consequences."""
    return min((record for record in read(folder).values() if record.error), key=lambda each: each.time, default=None)


def clear(folder: RunFolder, ranks: Sequence[int], *, everything: bool) -> None:
    """Remove what an earlier start of these ranks left. Other nodes may write to the same folder at the same time, so
    their ranks' files stay; with `everything`, files of higher ranks, left by a larger world, are removed too."""
    for files in (folder.failure, folder.failure_space, folder.heartbeat, folder.suspects):
        for rank, path in files.existing().items():
            if rank in ranks or (everything and rank > max(ranks)):
                path.unlink(missing_ok=True)


def log_sizes(folder: RunFolder) -> dict[int, int]:
    """The size of each rank's log in bytes."""
    return {rank: path.lstat().st_size for rank, path in folder.rank_log.existing().items()}


def tail(folder: RunFolder, rank: int, lines: int = 20, since: int = 0) -> str:
    """The last lines of a rank's log, after the first `since` bytes."""
    try:
        with os.fdopen(regular_files.open_descriptor(folder.rank_log(rank)), "rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(_without_dump(text.splitlines())[-lines:])


def _without_dump(lines: list[str]) -> list[str]:
    """Of a dump that faulthandler wrote, which has the stacks of all threads: where the thread that crashed was, and
    lines of the user's code."""
    start = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")), None)
    if start is None:
        return lines
    crashed = next((number for number in range(start, len(lines)) if lines[number].startswith("Current thread")), start)
    kept, programs = [], Path(sys.executable).parent  # where `paceline` itself is
    for number, line in enumerate(lines[start + 1 :], start + 1):
        is_crash = crashed < number <= crashed + _CRASH_FRAMES and crashed > start
        if (found := _DUMPED.match(line)) and (
            is_crash or (is_user_file(found[1]) and Path(found[1]).parent != programs)
        ):
            kept.append(line)
        elif number == crashed:
            kept.append("in the thread that crashed, innermost call first:")
    return lines[: start + 1] + kept
