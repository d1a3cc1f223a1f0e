"""What is recorded about where a run trains."""

from __future__ import annotations

import torch

import paceline
from paceline.monitor import run_environment


def test_versions_host_and_command_are_recorded() -> None:
    found = run_environment.describe()
    assert found["torch"] == torch.__version__ and found["paceline"] == paceline.__version__
    assert {"command", "host", "python", "started", "system"} <= found.keys()
    assert all(isinstance(value, str) for value in found.values()) and "CUDA" not in found
