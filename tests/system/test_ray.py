"""Launchers on a real Ray of two nodes. One training script has the same losses there as anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from system import curve, ray_server
from system.waiting import DEADLINE, eventually

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts a Ray cluster: set PACELINE_SYSTEM_TESTS=1"
    ),
    pytest.mark.timeout(400),
]
STAND_IN = """
import json, os, sys
order = json.loads(sys.stdin.readline())
print("hello from", order["node"], flush=True)
print("a complaint", file=sys.stderr, flush=True)
if "status" in order:
    sys.exit(order["status"])
with open(order["answer"], "w") as answer:
    answer.write(f"{os.getpid()}\\n")
sys.stdin.read()
"""
FRONT_END = """
import json, os, signal, sys, time
from pathlib import Path
from paceline.launcher.backends.ray import RayBackend

folder = Path(sys.argv[1])
backend = RayBackend("auto", 2, 1, gpu=None, patience=60, arguments=("-c", (folder / "stand_in.py").read_text()))
answers = [folder / "answer-0", folder / "answer-1"]

def eventually(look):
    while not (seen := look()):
        time.sleep(0.02)
    return seen

def order(node, **more):
    return json.dumps({"node": node, "answer": str(answers[node]), **more}).encode() + b"\\n"

def pid(node):
    return eventually(lambda: answers[node].exists() and answers[node].read_text().endswith("\\n")
        and int(answers[node].read_text()))
"""
LIFE = """
told = {"names": len(backend.names), "address": backend.address()}
backend.start(0, order(0))
backend.start(1, order(1, status=3))
told["failed"] = eventually(backend.ended)
os.kill(pid(0), signal.SIGKILL)
told["killed"] = eventually(backend.ended)
answers[0].unlink()
backend.start(0, order(0))
backend.start(1, order(1))
told["left"] = [pid(0), pid(1)]
told["parent"] = os.getppid()
backend.stop()
(folder / "told").write_text(json.dumps(told))
"""
KILLED = """
backend.start(0, order(0))
backend.start(1, order(1))
(folder / "left").write_text(json.dumps([pid(0), pid(1)]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[dict[str, str]]:
    """The environment in which `--ray auto` finds the cluster."""
    with ray_server.running() as environment:
        yield environment


def run(front_end: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "stand_in.py").write_text(STAND_IN)
    return subprocess.run(
        [sys.executable, "-c", FRONT_END + front_end, str(folder)],
        env=environment, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip


def test_launchers_are_started_watched_and_ended(ray: dict[str, str], tmp_path: Path) -> None:
    done = run(LIFE, tmp_path, ray)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told").read_text())
    assert told["names"] == 2 and told["address"] == ray["RAY_ADDRESS"].rpartition(":")[0]
    assert told["failed"] == {"1": "exit status 3\na complaint"}
    assert told["killed"] == {"0": "killed by SIGKILL\na complaint"}
    assert done.stdout.count("hello from 0\n") == done.stdout.count("hello from 1\n") == 2
    assert not any(psutil.pid_exists(pid) for pid in told["left"])


@pytest.mark.nightly
def test_launchers_end_when_the_front_end_was_killed(ray: dict[str, str], tmp_path: Path) -> None:
    assert run(KILLED, tmp_path, ray).returncode == -signal.SIGKILL
    left = json.loads((tmp_path / "left").read_text())
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in left))


@pytest.mark.nightly
def test_a_cluster_without_free_resources_has_a_code(ray: dict[str, str], tmp_path: Path) -> None:
    asking = 'RayBackend("auto", 2, 3, gpu=None, patience=1, wait=3)'
    done = subprocess.run(
        [sys.executable, "-c", f"from paceline.launcher.backends.ray import RayBackend\n{asking}"],
        env=ray, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    missing = "requested 3 CPUs on each of 2 nodes; 0 of 2 nodes have that many, and 4 of 4 CPUs are free"
    assert f"waiting for Ray: {missing}\n" in done.stderr
    assert f"[launch.no-ray-room] The Ray cluster had insufficient resources for 3 s: {missing}." in done.stderr


@pytest.mark.nightly
def test_a_training_has_the_losses_of_plain_python(ray: dict[str, str], tmp_path: Path) -> None:
    curve.launch(tmp_path, "--ray", "auto", "--nodes", "2", env=ray)
