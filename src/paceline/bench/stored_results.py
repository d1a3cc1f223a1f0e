"""Results of benchmarks, kept for comparison: `runs/bench/scaling-gpt2-1f0c…/2026-11-16T16-03-02.json`.

A folder holds the results of one recipe; one of other steps (another batch, model, layout) has its own.
"""

from __future__ import annotations

import json
import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.run import folder, regular_files

RESULTS = folder.ROOT / "bench"


def folder_of(kind: str, name: str, digest: str) -> Path:
    return RESULTS / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{digest}"


def newest(at: Path) -> dict[str, Any] | None:
    """The last result in a folder; None if there is none that can be read."""
    for path in sorted(at.glob("*.json"), reverse=True):
        with suppress(OSError, ValueError):
            found = json.loads(regular_files.read_bytes(path))
            if isinstance(found, dict):
                return found
    return None


def store(at: Path, values: Mapping[str, Any]) -> Path:
    """Write a result, with where and when it was measured."""
    now = datetime.now()
    facts = {
        "date": now.isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"paceline": __version__, "torch": version("torch"), "python": platform.python_version()},
    }
    at.mkdir(parents=True, exist_ok=True)
    path = at / f"{now:%Y-%m-%dT%H-%M-%S}.json"
    regular_files.replace(path, json.dumps({**facts, **values}, indent=1).encode())
    return path
