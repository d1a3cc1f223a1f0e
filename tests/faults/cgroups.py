"""A memory cgroup with little memory, for processes that the kernel's OOM killer is to end.

It is a child of this process's own, so no process leaves the limits that it was given. That takes rights, and cgroups
of version 1: in version 2 a cgroup with processes in it has no children with limits.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_LIMIT = 128 << 20
_SECONDS = 10.0


class NoCgroup(Exception):
    """Making one takes rights that this process lacks, or a kernel of another kind."""


@contextmanager
def small() -> Iterator[str]:
    """Its folder."""
    try:
        folder = _make()
    except OSError as error:
        raise NoCgroup(f"no memory cgroup can be made here: {error}") from error
    try:
        yield str(folder)
    finally:
        _remove(folder)


@contextmanager
def required() -> Iterator[str]:
    """For a test: where it can't be made the test is skipped; in CI, which can, it fails."""
    try:
        with small() as folder:
            yield folder
    except NoCgroup as error:
        (pytest.fail if os.environ.get("PACELINE_SYSTEM_TESTS") else pytest.skip)(str(error))


def _make() -> Path:
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    if own is None:
        raise OSError("the memory controller of cgroups version 1 is not there")
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=f"/sys/fs/cgroup/memory{own}"))
    (folder / "memory.limit_in_bytes").write_text(str(_LIMIT))
    return folder


def _remove(folder: Path) -> None:
    """It is busy until the last process in it is gone for good."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
