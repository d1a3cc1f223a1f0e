"""The rank runner and the leak watcher, tested as a user's tests would use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import dist
from paceline.testing import RankFailure, ranks, run_on_ranks


@ranks(2)
def test_a_test_runs_in_a_group_with_the_debug_switch_on() -> None:
    assert (dist.world(), dist.is_initialized(), torch.distributed.get_backend()) == (2, True, "gloo")


def test_a_failure_on_one_rank_is_shown_with_its_output() -> None:
    def body() -> None:
        print("words of rank", dist.rank())
        dist.barrier()  # both are there: rank 0 has nothing more to do when rank 1 fails
        assert dist.rank() == 0, "not me"

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, body)
    text = str(caught.value)
    assert text.index("rank 1: failed") < text.index("rank 0: passed")
    assert "AssertionError: not me" in text and "words of rank 1" in text


def test_a_rank_that_hangs_is_ended() -> None:
    def body() -> None:
        if dist.rank() == 1:
            dist.barrier()

    with pytest.raises(RankFailure, match="rank 1"):
        run_on_ranks(2, body, timeout=2.0)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 0: ended with exit code 9"):
        run_on_ranks(1, lambda: os._exit(9))


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


def test_nobody_is_watched_who_did_not_ask(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import os\ndef test_leaky():\n    os.environ['LEFT_BEHIND'] = '1'\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
