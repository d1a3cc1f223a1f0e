"""What all tests share. Leaks are watched by the plugin (`--no-leaks`, set in pyproject.toml)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Tests start ranks: each gets one thread, and helpers beside the tests (tiny.py) can be imported by name.
os.environ["OMP_NUM_THREADS"] = "1"
if "PACELINE_GPU_TESTS" not in os.environ:  # `make gpu` sets it; all other tests are about CPU ranks
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parent))

import pytest

import paceline.train.trainer  # noqa: F401  # once, before ranks are forked: a second each otherwise


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, so that runs/ lands nowhere else."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
