"""The leak check, tested as a user's tests would use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "process": ("import subprocess", "subprocess.Popen(['sleep', '30'])", "process"),
    "port": (
        "import socket\nkept = []",
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); kept.append(s)",
        "port",
    ),
    "variable": ("import os", "os.environ['LEFT_BEHIND'] = '1'", "LEFT_BEHIND"),
    "group": (
        "import torch.distributed as d, tempfile",
        "d.init_process_group('gloo', store=d.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)",
        "process group",
    ),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one session, in which each test leaves something else behind."""
    folder = tmp_path_factory.mktemp("leaky")
    for kind, (setup, leak, _) in LEAKS.items():
        (folder / f"test_{kind}.py").write_text(f"{setup}\ndef test_leaky():\n    {leak}\n")
    (folder / "test_neat.py").write_text("def test_neat(): pass")
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", "-rE", "--no-leaks"]
    wide = {**os.environ, "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True, timeout=100)
    assert f"{len(LEAKS) + 1} passed, {len(LEAKS)} errors" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", LEAKS)
def test_a_test_that_leaves_something_behind_fails(report: str, kind: str) -> None:
    [said] = [line for line in report.splitlines() if line.startswith(f"ERROR test_{kind}.py::test_leaky")]
    assert LEAKS[kind][2] in said


def test_without_the_option_no_leak_is_reported_and_torch_is_not_imported(tmp_path: Path) -> None:
    leaky = "os.environ['LEFT_BEHIND'] = '1'; assert 'torch' not in sys.modules"
    (tmp_path / "test_it.py").write_text(f"import os, sys\ndef test_leaky():\n    {leaky}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
