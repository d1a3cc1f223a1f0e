"""Lets the launcher read the stack of this process from outside (stacks.py)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from paceline.run import regular_files

STACK_SIGNAL = signal.SIGRTMIN + 4 if sys.platform == "linux" else signal.SIGUSR2  # SIGUSR1 requests a checkpoint
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # Linux prctl, of the Yama security module


def allow(file: Path) -> None:
    """Allow other processes of this user to read the memory of this one and of those that it forks, and write the stack
    of the main thread to a file when asked for it by a signal."""
    if sys.platform != "linux":
        return
    _allow_reading()
    os.register_at_fork(after_in_child=_allow_reading)
    with suppress(OSError):
        descriptor = regular_files.open_descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=False)  # stays open


def _allow_reading() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
