from __future__ import annotations

import os
import signal

import pytest

from paceline.errors import DataError
from paceline.runtime.fork import call_in_child


def test_a_function_runs_in_another_process() -> None:
    parent = os.getpid()
    assert call_in_child(lambda: [os.getpid() != parent, None, "a" * 100_000]) == [True, None, "a" * 100_000]


def test_errors_are_raised_here() -> None:
    def fail() -> None:
        raise DataError("empty", "No samples.")

    with pytest.raises(DataError, match=r"\[data\.empty\] No samples\."):
        call_in_child(fail)
    with pytest.raises(RuntimeError, match="division by zero"):
        call_in_child(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="the process was killed"):
        call_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))
