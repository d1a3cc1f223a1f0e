"""Hides a folder from one process: in a mount namespace with an empty file system over it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

_NEW_NAMESPACE = 0x00020000
_PRIVATE_BELOW = (1 << 18) | (1 << 14)


def hide(folder: Path) -> None:
    """From this process, and from threads that it starts later. Root can, where the system permits it."""
    library = ctypes.CDLL(None, use_errno=True)
    calls = [
        lambda: library.unshare(_NEW_NAMESPACE),
        lambda: library.mount(None, b"/", None, _PRIVATE_BELOW, None),
        lambda: library.mount(b"none", bytes(folder), b"tmpfs", 0, None),
    ]
    for call in calls:
        if call() != 0:
            raise OSError(ctypes.get_errno(), "this process may not hide a folder")


def a_folder_to_hide(parent: Path) -> Path:
    """Skips the test where folders can't be hidden."""
    folder = parent / "run"
    folder.mkdir()
    process = os.fork()
    if process == 0:
        try:
            hide(folder)
        except (OSError, AttributeError):
            os._exit(1)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        pytest.skip("mount namespaces are not permitted here")
    return folder
