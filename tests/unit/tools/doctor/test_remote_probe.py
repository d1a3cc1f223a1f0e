"""The code that is sent to hosts, run as it is there: by an interpreter that reads it from standard input."""

from __future__ import annotations

import ast
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.launcher.cluster.fingerprint import fingerprint
from paceline.runtime.network import LOOPBACK, listen
from paceline.tools.doctor import links, remote_probe
from paceline.tools.doctor.links import LinkServer

SOURCE = Path(remote_probe.__file__).read_text()
TOKEN = secrets.token_bytes(links.TOKEN_BYTES)


@pytest.fixture
def server() -> Iterator[LinkServer]:
    with closing(LinkServer(listen(LOOPBACK, None), TOKEN)) as server:
        yield server


def answer(request: dict[str, Any], *options: str, before: str = "") -> dict[str, Any]:
    whole = {"folder": "/", "addresses": [LOOPBACK], "by_ssh": True, "seconds": 30, **request}
    done = subprocess.run(
        [sys.executable, *options, "-"], input=f"{before}\n{SOURCE}\nmain({json.dumps(whole)!r})\n",
        env={"SSH_CONNECTION": "127.0.0.9 1 10.0.0.2 22"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    facts: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith(remote_probe.MARK):
            facts |= json.loads(line.removeprefix(remote_probe.MARK))
    return facts


def test_it_answers_with_versions_folder_connection_and_clock(server: LinkServer, tmp_path: Path) -> None:
    hello = (TOKEN + links.PING).hex()
    facts = answer({"folder": str(tmp_path / "missing"), "port": server.port, "hello": hello})
    assert facts["versions"] == fingerprint(script=None, recipe=None)["version"]
    assert facts["address"] == "10.0.0.2"
    assert facts["has_folder"] is False
    assert facts["connection"]["address"] == LOOPBACK  # after the address from which ssh came, where nobody listens
    assert abs(facts["connection"]["clock_offset"]) < 1
    assert facts["import_error"] == ""


def test_a_connection_that_is_not_answered_is_an_error_with_its_address(server: LinkServer) -> None:
    facts = answer({"port": server.port, "hello": bytes(links.TOKEN_BYTES).hex()}, "-S")
    assert facts["connection"]["errors"][1].startswith(f"{LOOPBACK}:{server.port}: ")


def test_without_packages_it_says_so(server: LinkServer) -> None:
    hello = (TOKEN + links.PING).hex()
    facts = answer({"port": server.port, "hello": hello, "by_ssh": False}, "-S")
    assert facts["versions"]["torch"] == facts["versions"]["paceline"] == "not installed"
    assert facts["import_error"].startswith("paceline: ModuleNotFoundError")


def test_it_is_understood_by_python_3_7() -> None:
    ast.parse(SOURCE, feature_version=(3, 7))
