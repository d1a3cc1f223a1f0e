"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

DEADLINE = 100.0
T = TypeVar("T")


def eventually(there: Callable[[], T]) -> T:
    """The first answer that is something."""
    end = time.monotonic() + DEADLINE
    while not (seen := there()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return seen


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
