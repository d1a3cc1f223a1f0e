"""Where a thread stands, from its stack: "trainer.evaluate() at train.py:17". Costs nothing until somebody asks.

The stack is one of this process, or one that was read from outside (evidence.py).
"""

from __future__ import annotations

import gc
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise, takewhile
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from paceline.diagnose.hang.evidence import StackFrame

_HOMES = {
    "paceline/": str(Path(__file__).parents[2]) + "/",
    "torch/": str(Path((find_spec("torch") or __spec__).origin or "").parent) + "/",  # without an import
}
_STDLIB = sysconfig.get_path("stdlib") + "/"
_ANY_STDLIB = re.compile(r"/lib(?:64)?/python3\.\d+/(.*)")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_TRAINER = {f"paceline/train/{name}.py" for name in ("trainer", "trainer_methods", "custom_loop_methods")}
_DIST = {"paceline/runtime/collectives.py", "paceline/runtime/collective_calls.py"}
_WRAPPER = "paceline/train/trainer_kwargs.py"  # a frame between the user's code and a method of the Trainer
_BACKWARD = "torch/autograd/graph.py"  # which waits for the reduction of gradients
_WAITING = ("torch/distributed/", _BACKWARD, "paceline/diagnose/hang/barrier.py", "paceline/runtime/")
# Innermost functions of torch.distributed, while a rank waits for one other.
_P2P = {
    "send",
    "recv",
    "isend",
    "irecv",
    "send_object_list",
    "recv_object_list",
    "batch_isend_irecv",
    "_wait_batch_p2p",
}
_DEBUGGERS = {"bdb", "pdb", "pydevd", "debugpy", "ipdb", "IPython", "_pydevd_bundle"}
Activity = Literal["data", "collective", "debugger", ""]
_DOING: dict[Activity, str] = {
    "data": ", reading a batch", "collective": ", waiting for other ranks", "debugger": ", in a debugger",
}  # fmt: skip
_FROM_WORKER = ", waiting for a DataLoader worker"


class StackPlace(NamedTuple):
    text: str  # "trainer.train() at train.py:17, in read_image() at data.py:88, reading a batch"
    activity: Activity
    line: str = ""  # the user's innermost line: "read_image() at data.py:88", or "trainer.train() at train.py:17"
    caller: str = ""  # what the user's code has called, if that line runs inside: "trainer.train() at train.py:17"
    from_worker: bool = False  # it waits for a DataLoader worker
    backward: bool = False  # innermost is the backward, which waits for other ranks, or computes
    p2p: bool = False  # it waits in a send or receive


def activity_of(text: str) -> Activity:
    """The activity of a place, from its text."""
    if text.endswith(_FROM_WORKER):
        return "data"
    return next((activity for activity, doing in _DOING.items() if text.endswith(doing)), "")


def place_of(frame: FrameType | None) -> StackPlace:
    """Where a stack of this process stands, whose innermost frame this is."""
    return place_of_stack(_stack_of(frame))


def place_of_stack(stack: Sequence[StackFrame]) -> StackPlace:
    """Where a stack stands, innermost frame first."""
    frames = [frame for frame in stack if _home(frame.file) != _WRAPPER]
    activity: Activity = "debugger" if _in_debugger(frames) else _activity(frames)
    from_worker = any(frame.function == "_try_get_data" for frame in frames)
    doing = _FROM_WORKER if from_worker and activity == "data" else _DOING.get(activity, "")
    text, line, caller = _lines(frames)
    backward = bool(frames) and _home(frames[0].file) == _BACKWARD
    p2p = activity == "collective" and frames[0].function in _P2P
    return StackPlace(text + doing, activity, line, caller, from_worker, backward, p2p)


def main_stack() -> list[StackFrame]:
    with _without_garbage_collection():
        return _stack_of(sys._current_frames().get(threading.main_thread().ident or 0))


def is_any_thread_in(function: str) -> bool:
    with _without_garbage_collection():
        stacks = map(_stack_of, sys._current_frames().values())
        return any(frame.function == function for stack in stacks for frame in stack)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """While the frames of other threads are walked. Before Python 3.12 the collector runs inside the allocation of a
    frame object. What it runs may release the GIL; the other thread leaves that frame, and the process crashes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def main_place() -> StackPlace:
    return place_of_stack(main_stack())


def _stack_of(frame: FrameType | None) -> list[StackFrame]:
    frames = []
    while frame is not None:
        frames.append(StackFrame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames


def _in_debugger(frames: list[StackFrame]) -> bool:
    """Whether the innermost line of the user's code has called one. A program may also run under a debugger that does
    not stop it: its frames are the outermost ones."""
    packages = (_home(frame.file).partition("/")[0].removesuffix(".py") for frame in takewhile(_is_librarys, frames))
    return any(package in _DEBUGGERS for package in packages)


def _activity(frames: list[StackFrame]) -> Activity:
    files = [_home(frame.file) for frame in frames if not frame.file.startswith("<")]
    if files and files[0].startswith(_WAITING):
        return "collective"
    # Outermost are the frames of a launcher, which may be torch's.
    data = next((number for number, file in enumerate(files) if file.startswith("paceline/data/")), None)
    exchanges = any(file.startswith("torch/distributed/") for file in files[:data])
    return "" if data is None or exchanges else "data"


def _lines(frames: list[StackFrame]) -> tuple[str, str, str]:
    """The last method of the Trainer, or collective, that the user's code has called, with its line; and the user's
    code that runs inside: a dataset, a model. Together, and then the innermost one and the other."""
    inside = next((frame for frame in frames if not _is_librarys(frame)), None)
    calls = ((inner, outer) for inner, outer in pairwise(frames) if not _is_librarys(outer))
    called = next(((_name(inner), outer) for inner, outer in calls if _name(inner)), None)
    if called is None:  # by a recipe
        name = next(filter(None, map(_name, reversed(frames))), "")
        return (name, name, "") if inside is None else (f"{_line(inside)}, in {inside.function}()", _at(inside), name)
    text = f"{called[0]} at {_line(called[1])}"
    if inside is called[1] or inside is None:
        return text, text, ""
    return f"{text}, in {inside.function}() at {_line(inside)}", _at(inside), text


def _name(frame: StackFrame) -> str:
    file, name = _home(frame.file), frame.function
    if file in _TRAINER:
        return "Trainer()" if name in ("__init__", "from_config") else f"trainer.{name}()"
    if file == "paceline/train/custom_loop.py" and name == "__iter__":
        return "a loop over trainer.loader()"
    if file in _DIST:
        return f"dist.{name}()"
    return f"torch.distributed.{name}()" if file.startswith("torch/distributed/") and name != "wrapper" else ""


def _is_librarys(frame: StackFrame) -> bool:
    return bool(_home(frame.file))


@lru_cache(maxsize=4096)
def _home(file: str) -> str:
    """The path of a library's file from its package on: "torch/distributed/rpc/api.py". Empty for the user's files. It
    may be a file of another node, which has its libraries elsewhere."""
    if file.startswith("<"):
        return file
    for package, folder in _HOMES.items():
        if file.startswith(folder):
            return package + file.removeprefix(folder)
    for folder in _INSTALLED:
        if folder in file:
            return file.rpartition(folder)[2]
    if file.startswith(_STDLIB):
        return file.removeprefix(_STDLIB)
    elsewhere = _ANY_STDLIB.search(file)
    return elsewhere[1] if elsewhere else ""


def _at(frame: StackFrame) -> str:
    name = "" if frame.function == "<module>" else f"{frame.function}() at "
    return name + _line(frame)


def _line(frame: StackFrame) -> str:
    return f"{Path(frame.file).name}:{frame.line}"
