"""Compares the public contract with its reviewed snapshots."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "contract" / "snapshots"
UPDATE = "PACELINE_UPDATE_SNAPSHOTS"


def compare(name: str, value: Any) -> None:
    """Fail unless `value`, as JSON, is what contract/snapshots/NAME.json holds."""
    path = FOLDER / f"{name}.json"
    now = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get(UPDATE) == "1":
        path.write_text(now, encoding="utf-8")
        return
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if now != before:
        lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "committed", "found", lineterm="", n=2)
        pytest.fail(
            f"The public contract changed: tests/contract/snapshots/{path.name}\n"
            + "\n".join(lines)
            + f"\nIf the change is intended, run the tests again with {UPDATE}=1 and commit the snapshot.",
            pytrace=False,
        )
