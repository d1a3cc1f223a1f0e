from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launcher.backends.subprocesses import SubprocessBackend

NODE = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "order").write_text(sys.stdin.readline())
sys.stdin.read()
(folder / "end").touch()
"""


def test_a_process_gets_a_long_order_and_ends_with_its_standard_input(tmp_path: Path) -> None:
    backend = SubprocessBackend(["a"], lambda node: [sys.executable, "-c", NODE, str(tmp_path)], patience=60)
    order = "x" * 300_000 + "\n"
    backend.start(0, order.encode())
    written = tmp_path / "order"
    while not (written.exists() and written.read_text() == order):
        os.sched_yield()
    assert backend.ended() == {}
    backend.stop()
    assert (tmp_path / "end").exists()


def test_the_last_lines_of_a_process_are_reported_once() -> None:
    die = [sys.executable, "-c", "import sys; print('a\\nno key', file=sys.stderr); sys.exit(5)"]
    backend = SubprocessBackend(["a"], lambda node: die, patience=60)
    backend.start(0, b"{}\n")
    while not (told := backend.ended()):
        os.sched_yield()
    assert told == {0: "exit status 5\na\nno key"}
    assert backend.ended() == {}


def test_a_process_that_ignores_its_input_is_killed() -> None:
    deaf = [sys.executable, "-c", "import signal; signal.pause()"]
    backend = SubprocessBackend(["a"], lambda node: deaf, patience=0.1)
    backend.start(0, b"{}\n")
    backend.start(0, b"{}\n")  # again, while the first one runs
    backend.stop()


def test_a_missing_command_has_a_code() -> None:
    backend = SubprocessBackend(["a"], lambda node: ["no-such-command"], patience=1)
    with pytest.raises(LaunchError, match=r"launch\.no-program"):
        backend.start(0, b"{}\n")
