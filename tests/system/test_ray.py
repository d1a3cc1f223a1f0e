"""Launching on a real Ray: a cluster of two nodes on this machine, with its own folder, ports and token.

Everything that imports Ray runs in processes of its own, because Ray's imports warn, and warnings fail our tests.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts a Ray cluster: set PACELINE_SYSTEM_TESTS=1"
    ),
    pytest.mark.timeout(400),
]
DEADLINE = 100.0
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
from paceline.launcher.ray_cluster import RayMachines

folder = Path(sys.argv[1])
machines = RayMachines("auto", 2, 1, gpu=None, patience=60, arguments=("-c", (folder / "stand_in.py").read_text()))
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
told = {"names": len(machines.names), "address": machines.address()}
machines.start(0, order(0))
machines.start(1, order(1, status=3))
told["failed"] = eventually(machines.ended)
os.kill(pid(0), signal.SIGKILL)
told["killed"] = eventually(machines.ended)
answers[0].unlink()
machines.start(0, order(0))
machines.start(1, order(1))
told["left"] = [pid(0), pid(1)]
told["parent"] = os.getppid()
machines.stop()
(folder / "told").write_text(json.dumps(told))
"""
KILLED = """
machines.start(0, order(0))
machines.start(1, order(1))
(folder / "left").write_text(json.dumps([pid(0), pid(1)]))
os.kill(os.getpid(), signal.SIGKILL)
"""
REDUCE = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
if rank == 0:
    print("the sum is", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(7 * rank)
"""


def eventually(look: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE
    while not (seen := look()):
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.02)
    return seen


@pytest.fixture(scope="module")
def ray() -> Iterator[dict[str, str]]:
    """The environment in which `--ray auto` finds the cluster."""
    # Not pytest's folder: names of Unix sockets, which Ray makes below it, may have 107 letters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        started: list[subprocess.Popen[bytes]] = []
        try:
            client_port = _free_port()
            started.append(
                _start(environment, "--head", "--port=0", f"--temp-dir={folder}/ray", "--include-dashboard=false",
                       f"--ray-client-server-port={client_port}")
            )  # fmt: skip
            found = Path(folder, "ray", "ray_current_cluster")
            address = eventually(lambda: found.exists() and found.read_text().strip())
            started.append(_start(environment, f"--address={address}"))
            yield {**environment, "RAY_ADDRESS": address}
        finally:
            for process in started:
                _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _start(environment: dict[str, str], *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", "--num-gpus=0"]
    return subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked to, Ray would take half a minute to end."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=DEADLINE)


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
    assert told["killed"] == {"0": "ended by SIGKILL\na complaint"}
    assert done.stdout.count("hello from 0\n") == done.stdout.count("hello from 1\n") == 2
    assert not any(psutil.pid_exists(pid) for pid in told["left"])


def test_launchers_end_when_the_front_end_was_killed(ray: dict[str, str], tmp_path: Path) -> None:
    assert run(KILLED, tmp_path, ray).returncode == -signal.SIGKILL
    left = json.loads((tmp_path / "left").read_text())
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in left))


def test_a_cluster_without_room_is_said_and_coded(ray: dict[str, str], tmp_path: Path) -> None:
    asking = 'RayMachines("auto", 2, 3, gpu=None, patience=1, wait=3)'
    done = subprocess.run(
        [sys.executable, "-c", f"from paceline.launcher.ray_cluster import RayMachines\n{asking}"],
        env=ray, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    missing = (
        "asked for: 3 CPUs on each of 2 machines; there: 0 of 2 machines have as many, and 4 of all 4 CPUs are free"
    )
    assert f"ray: waiting; {missing}\n" in done.stderr
    assert f"[launch.no-ray-room] The Ray cluster had no room within 3 s: {missing}." in done.stderr


def test_ranks_of_two_nodes_reduce_and_a_failure_is_told(ray: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    command = [sys.executable, "-m", "paceline", "launch", "--ray", "auto", "--nodes", "2", "-n", "1", "--cpu"]
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, env=ray, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 7, done.stderr
    assert "the sum is 3.0\n" in done.stdout
    assert "rank 1" in done.stderr
