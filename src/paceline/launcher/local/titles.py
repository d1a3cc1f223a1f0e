"""Process titles, so that ps, top and nvidia-smi tell ranks apart."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

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
