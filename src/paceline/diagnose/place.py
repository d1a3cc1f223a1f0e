"""Where a thread stands, from its stack: "trainer.evaluate() at train.py:17". Costs nothing until somebody asks."""

from __future__ import annotations

import sys
import sysconfig
import threading
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

_OURS = str(Path(__file__).parents[1]) + "/"
_TORCH = str(Path((find_spec("torch") or __spec__).origin or "").parent) + "/"  # without an import
_NOT_USERS = (_OURS, _TORCH, sysconfig.get_path("stdlib") + "/", "<")
_WRAPPER = f"{_OURS}train/method_hints.py"  # a frame between the user's code and a method of the Trainer
_WAITING = (
    f"{_TORCH}distributed/",
    f"{_TORCH}autograd/graph.py",  # the backward, which waits for the reduction of gradients
    f"{_OURS}parallel/agreement.py",
    f"{_OURS}parallel/same_call.py",
    f"{_OURS}runtime/",
)
_DEBUGGERS = {"bdb", "pdb", "pydevd", "debugpy", "ipdb", "IPython", "_pydevd_bundle"}
Activity = Literal["data", "collective", "debugger", ""]
_DOING = {"data": ", reading a batch", "collective": ", waiting for other ranks", "debugger": ", in a debugger"}


class StackPlace(NamedTuple):
    text: str  # "trainer.evaluate() at train.py:17"
    activity: Activity


def place_of(frame: FrameType | None) -> StackPlace:
    """Where a stack stands, whose innermost frame this is."""
    frames = []
    while frame is not None:
        if frame.f_code.co_filename != _WRAPPER:
            frames.append(frame)
        frame = frame.f_back
    names = {frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames}
    activity: Activity = "debugger" if names & _DEBUGGERS else _activity(frames)
    from_worker = any(frame.f_code.co_name == "_try_get_data" for frame in frames)
    doing = ", waiting for a DataLoader worker" if from_worker and activity == "data" else _DOING.get(activity, "")
    return StackPlace(_text(frames) + doing, activity)


def main_place() -> StackPlace:
    return place_of(sys._current_frames().get(threading.main_thread().ident or 0))


def _activity(frames: list[FrameType]) -> Activity:
    files = [frame.f_code.co_filename for frame in frames if not frame.f_code.co_filename.startswith("<")]
    if files and files[0].startswith(_WAITING):
        return "collective"
    # Outermost are the frames of a launcher, which may be torch's.
    data = next((number for number, file in enumerate(files) if file.startswith(f"{_OURS}data/")), None)
    exchanges = any(file.startswith(f"{_TORCH}distributed/") for file in files[:data])
    return "" if data is None or exchanges else "data"


def _text(frames: list[FrameType]) -> str:
    """The last method of the Trainer, or collective, that the user's code has called, with its line; and the user's
    code that runs inside: a dataset, a model."""
    inside = next((frame for frame in frames if _is_users(frame)), None)
    calls = ((inner, outer) for inner, outer in pairwise(frames) if _is_users(outer))
    called = next(((_name(inner), outer) for inner, outer in calls if _name(inner)), None)
    if called is None:  # by a recipe
        name = next(filter(None, map(_name, reversed(frames))), "")
        return name if inside is None else f"{_line(inside)}, in {inside.f_code.co_name}()"
    text = f"{called[0]} at {_line(called[1])}"
    return text if inside is called[1] or inside is None else f"{text}, in {inside.f_code.co_name}() at {_line(inside)}"


def _name(frame: FrameType) -> str:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file == f"{_OURS}train/trainer.py":
        return "Trainer()" if name in ("__init__", "from_config") else f"trainer.{name}()"
    if file == f"{_OURS}train/custom_loop.py" and name == "__iter__":
        return "a loop over trainer.loader()"
    if file == f"{_OURS}runtime/collectives.py":
        return f"dist.{name}()"
    return f"torch.distributed.{name}()" if file.startswith(f"{_TORCH}distributed/") and name != "wrapper" else ""


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(_NOT_USERS) and "site-packages" not in file


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
