"""Checks hosts over ssh before anything is launched there: login, interpreter, working directory, connections back to
this machine, and the clock.

Each host is reached by one ssh command, in parallel. The code that runs there (remote_probe.py) is sent over standard
input, so it needs nothing but an interpreter. It connects to a listener on this machine, as launchers will.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launcher.backends.ssh import Host, remote_command, ssh_argv
from paceline.launcher.cluster.fingerprint import fingerprint
from paceline.runtime.network import listen, own_addresses_of
from paceline.tools.doctor import links, remote_probe
from paceline.tools.doctor.finding import Finding, graded
from paceline.tools.doctor.links import LinkServer, judge_clock, open_ports

SECONDS = 15.0  # for a host
_LOGIN_SECONDS = 5
_MAX_THREADS = 64
_REFUSALS = (  # of ssh; the first one that it says counts
    "identification has changed", "host key verification failed", "could not resolve", "permission denied",
    "connection refused", "timed out", "no route to host",
)  # fmt: skip


@dataclass(frozen=True)
class HostAnswer:
    """What came back from a host. `status`: exit status of ssh; None if it did not end in time."""

    status: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)  # of remote_probe.py, as far as it got
    errors: str = ""  # standard error


def check(
    hosts: Sequence[Host],
    *,
    ssh: Sequence[str],
    python: str,
    folder: str,
    address: str | None = None,
    seconds: float = SECONDS,
) -> list[Finding]:
    """Findings about every host. `address`: of this machine, if the user chose one (--address)."""
    if shutil.which(ssh[0]) is None:
        return [graded("login", "fail", f"Program not found: {ssh[0]!r}.", "no ssh")]
    token = secrets.token_bytes(links.TOKEN_BYTES)
    with (
        closing(LinkServer(listen(address or "0.0.0.0", None), token)) as server,
        ThreadPoolExecutor(min(_MAX_THREADS, len(hosts))) as pool,
    ):
        # The addresses that launchers try: see launcher/cluster/frontend.py.
        own = [address] if address else [each for each in own_addresses_of(socket.gethostname()) if ":" not in each]
        request = {
            "folder": folder, "addresses": own, "by_ssh": address is None, "port": server.port,
            "hello": (token + links.PING).hex(), "seconds": links.CONNECT_SECONDS,
        }  # fmt: skip
        argv = (*ssh, "-o", f"ConnectTimeout={_LOGIN_SECONDS}")
        answers = pool.map(lambda host: _ask(host, argv, python, request, seconds), hosts)
        here = fingerprint(script=None, recipe=None)["version"]
        return [
            finding
            for host, answer in zip(hosts, answers, strict=True)
            for finding in judge(host, answer, here, python=python, folder=folder, seconds=seconds)
        ]


def _ask(host: Host, ssh: Sequence[str], python: str, request: Mapping[str, Any], seconds: float) -> HostAnswer:
    # In the root directory: the working directory may be missing, and nothing here shadows modules.
    argv = ssh_argv(host, remote_command("/", [python, "-"]), ssh)
    code = Path(remote_probe.__file__).read_text() + f"\nmain({json.dumps(request)!r})\n"
    try:
        done = subprocess.run(argv, input=code.encode(), capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as expired:
        return HostAnswer(None, _facts(expired.stdout or b""), (expired.stderr or b"").decode(errors="replace"))
    return HostAnswer(done.returncode, _facts(done.stdout), done.stderr.decode(errors="replace"))


def _facts(output: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(remote_probe.MARK):  # whole: it is written at once
            facts |= json.loads(line.removeprefix(remote_probe.MARK))
    return facts


def judge(
    host: Host, answer: HostAnswer, here: Mapping[str, str], *, python: str, folder: str, seconds: float = SECONDS
) -> list[Finding]:
    """`here`: the versions on this machine."""
    name, facts = host.name, answer.facts
    if "versions" not in facts:
        return _judge_login(host, answer, python, seconds)
    findings = [
        Finding("login", "ok", f"ssh {name}", host=name),
        _judge_versions(name, facts["versions"], here, python),
    ]
    is_there = facts.get("has_folder", True)
    what, command = folder if is_there else f"{folder} does not exist on {name}.", f"mkdir -p {shlex.quote(folder)}"
    findings.append(
        graded("working directory", "ok" if is_there else "fail", what, host=name, on=name, command=command)
    )
    findings += _judge_connection_back(name, facts)
    error = facts.get("import_error")
    if error and "not installed" not in facts["versions"].values():  # which is the cause, and reported already
        what, python = f"An import fails on {name}: {error}.", shlex.quote(python)
        findings.append(graded("imports", "fail", what, "failed", host=name, python=python))
    elif error is None:
        what = f"Importing torch on {name} takes more than {seconds:g} s."
        findings.append(graded("imports", "warn", what, "slow", host=name))
    return findings


def _judge_login(host: Host, answer: HostAnswer, python: str, seconds: float) -> list[Finding]:
    """It did not get as far as running the code."""
    lines = [line.strip() for line in answer.errors.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    if answer.status in (None, 255):
        happened = "Cannot log in to" if answer.status else f"No answer within {seconds:g} s from"
        said = answer.errors.lower() if answer.status else "timed out"
        case, what = next((words for words in _REFUSALS if words in said), ""), f"{happened} {host.name}{last}"
        return [graded("login", "fail", what, case, host=host.name, on=host.name, machine=host.machine)]
    what = f"The interpreter {python} cannot be used on {host.name} (exit status {answer.status}){last}"
    return [
        Finding("login", "ok", f"ssh {host.name}", host=host.name),
        graded("versions", "fail", what, "no interpreter", host=host.name),
    ]


def _judge_versions(name: str, there: Mapping[str, str], here: Mapping[str, str], python: str) -> Finding:
    different = [package for package in here if here[package] != there[package]]
    if not different:
        what = ", ".join(f"{package} {version}" for package, version in here.items())
        return Finding("versions", "ok", f"{what}, as here", host=name)
    fixes = ["pass --python with an interpreter of that version"] * ("python" in different)
    if packages := [f"{package}=={here[package]}" for package in different if package != "python"]:
        build = here["torch"].partition("+")[2] if "torch" in different else ""
        index = f" --extra-index-url https://download.pytorch.org/whl/{build}" if build else ""
        fixes.append(f"ssh {name} {shlex.quote(python)} -m pip install {' '.join(packages)}{index}")
    what = "; ".join(f"{package} is {here[package]} here and {there[package]} on {name}" for package in different)
    return Finding(
        "versions", "fail", f"{what}.", "the launcher rejects nodes with different versions", "; ".join(fixes), name
    )


def _judge_connection_back(name: str, facts: Mapping[str, Any]) -> list[Finding]:
    """The connection from a host to this machine, and its clock, which is measured over it."""
    connection = facts.get("connection", {})
    if "address" in connection:
        what = f"{name} connects to this machine at {connection['address']}"
        return [
            Finding("connection back", "ok", what, host=name),
            judge_clock(connection["clock_offset"], "this machine", name),
        ]
    tried = "; ".join(connection.get("errors", ())) or "it did not end in time"
    what, command = f"{name} cannot connect to this machine: {tried}.", open_ports(facts.get("address") or "ADDRESS")
    return [graded("connection back", "fail", what, host=name, command=command)]
