"""The line of the user's code that is running, for messages about a call."""

from __future__ import annotations

import sys
from types import FrameType

from paceline.run.folder import short
from paceline.run.user_frame import is_user_file


def running_line() -> str:
    """`train.py:17`: the innermost line outside of libraries. Empty in threads of autograd, and in recipes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
