"""What the tests of faults share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """An empty folder in memory where there is one: hundreds of saves that sync take a disk half a minute."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="paceline-", dir=memory if memory.is_dir() else None) as name:
        yield Path(name)
