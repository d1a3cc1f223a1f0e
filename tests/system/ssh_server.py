"""A real ssh server on loopback, with its own keys and configuration in a folder of the test's, or one on each of
several network namespaces.

On loopback it answers at 127.0.0.1 and 127.0.0.2, which the client's configuration calls node-a and node-b. Nothing of
the machine's own ssh is used or changed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from system.namespaces import Machine
from system.waiting import DEADLINE, eventually

ADDRESSES = {"node-a": "127.0.0.1", "node-b": "127.0.0.2"}


@dataclass(frozen=True)
class SshServer:
    port: int
    ssh: tuple[str, ...]  # the command that reaches it


@contextmanager
def running(folder: Path) -> Iterator[SshServer]:
    _make_keys(folder)
    process, port = _start(folder)
    try:
        yield SshServer(port, _client(folder, ADDRESSES, port))
    finally:
        process.terminate()
        process.wait()


@contextmanager
def running_on(machines: Mapping[str, Machine], folder: Path) -> Iterator[SshServer]:
    """A server on each of these machines, which the client's configuration calls by these names."""
    _make_keys(folder)
    sshd, port = _program(), 22
    processes = []
    try:
        for name, machine in machines.items():
            config = folder / f"server_config_{name}"
            config.write_text(_server_config(folder, [machine.address], port))
            command = ["ip", "netns", "exec", machine.name, sshd, "-D", "-f", str(config)]
            processes.append(subprocess.Popen([*command, "-E", str(folder / "sshd.log")]))
        for machine in machines.values():
            eventually(lambda machine=machine: (machine.address, port) in machine.listening())
        addresses = {name: machine.address for name, machine in machines.items()}
        yield SshServer(port, _client(folder, addresses, port))
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _make_keys(folder: Path) -> None:
    for key in ("host_key", "client_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "client_key.pub", folder / "authorized_keys")


def _program() -> str:
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert sshd, "sshd is not installed: tests/system/install.sh installs it"
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it, and Debian's service would make it
    return sshd


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    sshd = _program()
    log = folder / "sshd.log"
    for _ in range(5):  # somebody else may take the free port before sshd does
        port = _free_port()
        config = folder / "server_config"
        config.write_text(_server_config(folder, ADDRESSES.values(), port))
        process = subprocess.Popen([sshd, "-D", "-f", str(config), "-E", str(log)])
        if _answers(process, port):
            return process, port
        process.kill()
        process.wait()
    raise AssertionError(f"sshd did not start:\n{log.read_text()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < end:
        try:
            for address in ADDRESSES.values():
                with socket.create_connection((address, port), timeout=DEADLINE) as connection:
                    if not connection.recv(4).startswith(b"SSH"):
                        return False
            return True
        except OSError:
            time.sleep(0.02)
    return False


def _server_config(folder: Path, addresses: Iterable[str], port: int) -> str:
    listen = "\n".join(f"ListenAddress {address}:{port}" for address in addresses)
    return f"""{listen}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""


def _client(folder: Path, addresses: Mapping[str, str], port: int) -> tuple[str, ...]:
    """The command that reaches these addresses by their names."""
    hosts = "\n".join(f"Host {name}\n    HostName {address}" for name, address in addresses.items())
    config = folder / "client_config"
    config.write_text(f"""{hosts}
Host *
    Port {port}
    IdentityFile {folder}/client_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking accept-new
""")
    return "ssh", "-F", str(config)
