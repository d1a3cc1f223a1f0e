"""The line of the user's code that led to an error, or is running: the innermost frame outside paceline, torch and
other libraries."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from paceline import errors
from paceline.run.folder import short

_PACELINE, _STDLIB = str(Path(errors.__file__).parent), sysconfig.get_path("stdlib")
_INSTALLED = {"site-packages", "dist-packages"}
# DataLoader workers send their traceback as text.
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)\n(?: +(.*)\n)?', re.MULTILINE)
# A frame in a traceback with its source lines. Only frames of a SyntaxError have no function.
_BLOCK = r' +File "(.+)", line \d+, in .+\n(?: {4}.*\n)*(?:  \[Previous line .*\n)?'
_BLOCKS = re.compile(rf"^(?:{_BLOCK})+", re.MULTILINE)
_LONGEST = 100  # characters of code
_WORKER_TRACEBACK = "Original Traceback (most recent call last):\n"


@dataclass(frozen=True)
class UserFrame:
    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        """`train.py:17, in main: trainer.train(data)`"""
        code = self.code if len(self.code) <= _LONGEST else f"{self.code[:_LONGEST]}…"
        return f"{short(self.file)}:{self.line}, in {self.function}" + (f": {code}" if code else "")


def find_user_frame(error: BaseException) -> UserFrame | None:
    """The innermost frame of the user's code in the traceback of an error, or of the error that a library handled by
    raising this one. None if no code of the user was running."""
    chain = [error]
    while (handled := chain[-1].__cause__ or chain[-1].__context__) is not None:
        if any(handled is each for each in chain) or not _was_handled_by_library(chain[-1], handled):
            break  # `raise error from error` makes a cycle
        chain.append(handled)
    return next(filter(None, map(_own_frame, reversed(chain))), None)


def _own_frame(error: BaseException) -> UserFrame | None:
    if isinstance(error, SyntaxError) and error.filename and is_user_file(error.filename):
        return UserFrame(error.filename, error.lineno or 0, "<module>", (error.text or "").strip())
    if _WORKER_TRACEBACK in str(error):
        found = [UserFrame(file, int(line), name, code) for file, line, name, code in _FRAME.findall(str(error))]
    else:
        summary = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__))
        found = [UserFrame(each.filename, each.lineno or 0, each.name, each.line or "") for each in summary]
    return next((frame for frame in reversed(found) if is_user_file(frame.file)), None)


def running_user_frame() -> UserFrame | None:
    """The innermost frame of the user's code that is running now, for warnings."""
    frame = next((each for each, _ in traceback.walk_stack(None) if is_user_file(each.f_code.co_filename)), None)
    if frame is None:
        return None
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return UserFrame(code.co_filename, frame.f_lineno, code.co_name, line)


def running_line() -> str:
    """`train.py:17`, for messages about a call. The file is not read. Empty in threads of autograd, and in recipes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _was_handled_by_library(error: BaseException, handled: BaseException) -> bool:
    """A traceback starts at the function that handled the exception. An `except` of the user's code may do anything."""
    trace = handled.__traceback__
    return handled is error.__cause__ or (trace is not None and not is_user_file(trace.tb_frame.f_code.co_filename))


def hide_library_frames(text: str, whole: str) -> str:
    """A traceback with the user's frames alone, and the innermost if it is not paceline's. `whole`: the file that has
    all of them."""
    shown = _BLOCKS.sub(lambda found: _shown_frames(found.group()), text)
    first = re.search(r"^  … \(\d+ library frames?", shown, re.MULTILINE)
    return f"{shown[: first.end()]}; the whole traceback is in {whole}{shown[first.end() :]}" if first else shown


def _shown_frames(frames: str) -> str:
    found = [(each.group(), each.group(1)) for each in re.finditer(_BLOCK, frames)]
    last, shown, hidden = found[-1][0], "", 0
    for block, file in [*found, ("", "")]:
        if block and not is_user_file(file) and (block is not last or file.startswith(_PACELINE)):
            hidden += 1
            continue
        if hidden:
            shown += f"  … ({hidden} library frame{'s' * (hidden > 1)})\n"
        shown, hidden = shown + block, 0
    return shown


@cache
def is_user_file(file: str) -> bool:
    if file.startswith("<"):
        return file in ("<string>", "<stdin>")  # python -c, or typed in; others are frozen or generated modules
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = [_PACELINE, _STDLIB, *([str(Path(torch).parent)] if torch else [])]
    path = Path(file)
    return not _INSTALLED & set(path.parts) and not any(path.is_relative_to(each) for each in libraries)


def place_of(function: Any) -> str:
    """` (train.py:12)`: where the user defined a function; empty for others."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return f" ({short(code.co_filename)}:{code.co_firstlineno})" if code and is_user_file(code.co_filename) else ""
