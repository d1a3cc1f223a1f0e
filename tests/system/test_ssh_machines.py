"""Launchers on two hosts behind a real ssh server. A small program stands in for the launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.launcher.backends.ssh import SshBackend, read_hosts, remote_command
from system import ssh_server
from system.ssh_server import SshServer
from system.waiting import DEADLINE, eventually, is_gone

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts an ssh server: set PACELINE_SYSTEM_TESTS=1"
)
STAND_IN = """
import json, os, sys
order = json.loads(sys.stdin.readline())
with open(order["answer"] + ".partial", "w") as answer:
    json.dump({"pid": os.getpid(), "folder": os.getcwd(), "connection": os.environ["SSH_CONNECTION"], **order}, answer)
os.rename(order["answer"] + ".partial", order["answer"])
sys.stdin.read()
print("the front end is gone", file=sys.stderr)
"""


class Front:
    """A front end with two hosts."""

    def __init__(self, folder: Path, ssh: tuple[str, ...], program: str = sys.executable) -> None:
        self.folder = folder
        script = folder / "stand_in.py"
        script.write_text(STAND_IN)
        command = remote_command(str(folder), [program, str(script)])
        self.machines = SshBackend(read_hosts("node-a,node-b"), command, ssh=ssh, patience=DEADLINE)

    def start(self, node: int, **order: str) -> dict[str, Any]:
        """Start a launcher; returns what it says of itself."""
        answer = self.folder / f"answer-{node}"
        answer.unlink(missing_ok=True)
        self.machines.start(node, json.dumps({"answer": str(answer), **order}).encode() + b"\n")
        eventually(answer.exists)
        return dict(json.loads(answer.read_text()))

    def last_words(self) -> dict[int, str]:
        return eventually(self.machines.ended)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server.running(tmp_path_factory.mktemp("ssh")) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a $(touch canary); folder"
    folder.mkdir()
    return folder


@pytest.fixture
def front(server: SshServer, folder: Path) -> Iterator[Front]:
    front = Front(folder, server.ssh)
    yield front
    front.machines.stop()


def ssh_process(connection: str) -> psutil.Process:
    """The client whose end of the connection has this port."""
    port = int(connection.split()[1])
    return next(
        child for child in psutil.Process().children() if port in {end.laddr.port for end in child.net_connections()}
    )


def test_each_host_gets_its_order_and_is_told_the_end(front: Front, folder: Path) -> None:
    launchers = [front.start(0, script="a 'b' $(c)\\ü\n"), front.start(1)]
    assert [launcher["connection"].split()[2] for launcher in launchers] == list(ssh_server.ADDRESSES.values())
    assert [launcher["folder"] for launcher in launchers] == [str(folder)] * 2
    assert launchers[0]["script"] == "a 'b' $(c)\\ü\n"
    assert front.machines.ended() == {}
    front.machines.stop()
    assert [is_gone(launcher["pid"]) for launcher in launchers] == [True, True]
    assert not list(folder.rglob("canary"))


def test_a_killed_launcher_is_reported_once_and_can_be_restarted(front: Front) -> None:
    first, other = front.start(0), front.start(1)
    os.kill(first["pid"], signal.SIGKILL)
    ended = front.last_words()
    assert list(ended) == [0]
    assert "the launcher there was killed" in ended[0]
    assert front.machines.ended() == {}
    again = front.start(0)
    assert again["pid"] != first["pid"]
    assert not is_gone(other["pid"])


def test_a_launcher_that_loses_its_connection_ends(front: Front) -> None:
    launcher = front.start(1)
    ssh_process(launcher["connection"]).kill()
    eventually(lambda: is_gone(launcher["pid"]))
    assert "SIGKILL" in front.last_words()[1]


def test_no_process_list_shows_the_order(front: Front) -> None:
    launcher = front.start(0, token="cafe" + "f00d")
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert any("BatchMode=yes" in line and "node-a" in line for line in lines)
    assert not [line for line in lines if launcher["token"] in line]


def test_an_unreachable_host_is_reported_with_the_message_of_ssh(server: SshServer, folder: Path) -> None:
    front = Front(folder, (*server.ssh, "-p", "1"))
    front.machines.start(1, b"{}\n")
    words = front.last_words()[1]
    assert words.startswith("ssh could not log in")
    assert "Connection refused" in words


def test_a_missing_interpreter_is_reported(server: SshServer, folder: Path) -> None:
    front = Front(folder, server.ssh, program="/no/such/python")
    front.machines.start(0, b"{}\n")
    words = front.last_words()[0]
    assert words.startswith("the interpreter was not found there")
    assert "/no/such/python" in words


def test_a_missing_folder_is_reported(server: SshServer, folder: Path) -> None:
    front = Front(folder, server.ssh)
    folder.rename(folder.parent / "moved")
    front.machines.start(0, b"{}\n")
    assert "No such file or directory" in front.last_words()[0]
