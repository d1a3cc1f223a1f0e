"""Forks this process."""

from __future__ import annotations

import gc
import os


def fork() -> int:
    """`os.fork()`, with a child that never collects the garbage of its parent.

    Some objects own threads, which a fork does not copy. A `TCPStore` joins its thread when it is destroyed. In the
    child, the memory of that thread may belong to another one by then: the child would wait forever, or abort.
    """
    process = os.fork()
    if process == 0:
        gc.freeze()
    return process
