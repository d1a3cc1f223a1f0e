"""Ledgers of runs, written event by event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.run.folder import RunFolder
from paceline.run.ledger import Ledger

Line = tuple[float, str, dict[str, Any]]


def written(path: Path, *lines: Line) -> RunFolder:
    folder = RunFolder(path)
    for when, event, values in lines:
        Ledger(folder).note(event, at=when, **values)
    return folder
