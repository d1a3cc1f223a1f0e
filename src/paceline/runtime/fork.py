"""Forks this process, and titles processes so that ps, top and nvidia-smi tell them apart."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError


def fork() -> int:
    """`os.fork()`, with a child that never collects the garbage of its parent.

    Some objects own threads, which a fork does not copy. A `TCPStore` joins its thread when it is destroyed. In the
    child, the memory of that thread may belong to another one by then: the child would wait forever, or abort.
    """
    process = os.fork()
    if process == 0:
        gc.freeze()
    return process


def call_in_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked process, as JSON: one that may start threads or initialize CUDA, after which
    this process could not fork any more. An exception is a RuntimeError here, unless it has a code."""
    receiving, sending = os.pipe()
    process = fork()
    if process == 0:
        answer: dict[str, Any] = {}
        try:
            answer = {"value": function()}
        except PacelineError as error:
            answer = {"error": error.to_dict()}
        except BaseException as error:
            answer = {"raised": str(error) or type(error).__name__}
        finally:
            os.write(sending, json.dumps(answer).encode())
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        text = pipe.read()
    os.waitpid(process, 0)
    found = json.loads(text or b'{"raised": "the process was killed"}')
    if "error" in found:
        raise PacelineError.from_dict(found["error"])
    if "raised" in found:
        raise RuntimeError(found["raised"])
    return found["value"]


_PR_SET_NAME = 15  # Linux prctl
_ARG_START = 45  # position of the address of the arguments in /proc/self/stat, after the name; their end is next


def set_title(title: str, name: str) -> None:
    """Set the command line of this process, cut to the length of the current one, and its name in top, of at most 15
    letters. Python has copied its arguments, so their memory is free to be overwritten."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if start and end > start:  # 0 where the system hides them
            space = end - start - 1  # a zero at the end
            ctypes.memmove(start, title.encode(errors="replace")[:space].ljust(space, b"\0"), space)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
