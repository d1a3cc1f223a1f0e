"""The leak check, tested as a user's tests would use it."""

from __future__ import annotations

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


@pytest.mark.parametrize("kind", LEAKS)
def test_a_test_that_leaves_something_behind_fails(tmp_path: Path, kind: str) -> None:
    setup, leak, words = LEAKS[kind]
    (tmp_path / "test_it.py").write_text(f"{setup}\ndef test_leaky():\n    {leak}\n")
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", "--no-leaks", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "1 passed, 1 error" in done.stdout and words in done.stdout, done.stdout + done.stderr


def test_without_the_option_no_leak_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import os\ndef test_leaky():\n    os.environ['LEFT_BEHIND'] = '1'\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
