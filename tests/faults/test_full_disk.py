"""A full disk is named as the reason, although nothing can be written to it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from faults import write_faults
from paceline.errors import LaunchError


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a launch without a run folder keeps its logs."""
    try:
        with write_faults.small_disk(tmp_path / "disk", 400_000) as folder:
            monkeypatch.setattr(tempfile, "tempdir", str(folder))
            yield folder
    except write_faults.NotMounted as error:
        pytest.skip(f"no file system can be mounted: {error}")


def fill_and_fail(disk: str) -> None:
    if os.environ["RANK"] == "1":
        write_faults.fill(Path(disk), leave=0)
        raise ValueError("boom " + "x" * 100_000)


def fail() -> None:
    raise SystemExit(3 if os.environ["RANK"] == "1" else 0)


def test_an_error_after_the_disk_was_filled_is_reported(disk: Path) -> None:
    with pytest.raises(LaunchError, match="xxx") as caught:
        paceline.launch(fill_and_fail, ranks=2, disk=str(disk))
    assert "Rank 1 failed" in str(caught.value)


def test_without_room_for_any_record_the_disk_is_the_reason(disk: Path) -> None:
    write_faults.fill(disk, leave=0)
    with pytest.raises(LaunchError, match="No space left on device") as caught:
        paceline.launch(fail, ranks=2)
    assert caught.value.code == "launch.disk-full"
