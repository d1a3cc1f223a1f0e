"""A real Ray of two nodes on this machine, with its own folder, ports and token.

Everything that imports Ray runs in processes of its own, because Ray's imports warn, and warnings fail our tests.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from system.waiting import DEADLINE, eventually


@contextmanager
def running() -> Iterator[dict[str, str]]:
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
            first = Path(folder, "first.log")
            started.append(
                _start(environment, first, "--head", "--port=0", f"--temp-dir={folder}/ray",
                       "--include-dashboard=false", f"--ray-client-server-port={client_port}")
            )  # fmt: skip
            _wait_for(started[0], first)
            address = Path(folder, "ray", "ray_current_cluster").read_text().strip()
            second = Path(folder, "second.log")
            started.append(_start(environment, second, f"--address={address}"))
            _wait_for(started[1], second)
            yield {**environment, "RAY_ADDRESS": address}
        finally:
            for process in started:
                _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    def started() -> bool:
        said = log.read_text()
        assert process.poll() is None, f"Ray ended ('make system' installs it):\n{said}"
        return "Ray runtime started" in said

    eventually(started)


def _start(environment: dict[str, str], log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", "--num-gpus=0"]
    with log.open("wb") as output:
        return subprocess.Popen([*command, *options], env=environment, stdout=output, stderr=output)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked to, Ray would take half a minute to end."""
    if process.poll() is not None:
        return
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=DEADLINE)
