"""A pytest plugin, loaded by pytest if paceline is installed. It does nothing without `--no-leaks`."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_IGNORED = {"PYTEST_CURRENT_TEST"}  # set by pytest
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-leaks",
        action="store_true",
        help="fail tests that leak a process, a port, an environment variable or a process group",
    )


@pytest.fixture(autouse=True)
def paceline_no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--no-leaks"):
        yield
        return
    before = snapshot()
    yield
    leaked = find(before)
    if leaked:
        pytest.fail("the test leaked resources: " + "; ".join(leaked), pytrace=False)


@dataclass(frozen=True)
class Resources:
    """The resources of this process at one moment."""

    children: frozenset[int]
    ports: frozenset[int]
    environment: tuple[tuple[str, str], ...]
    group_open: bool


def snapshot() -> Resources:
    from paceline.diagnose.hang.process_stacks import children_of  # not while pytest starts

    variables = sorted((name, value) for name, value in os.environ.items() if name not in _IGNORED)
    distributed = sys.modules.get("torch.distributed")
    group_open = distributed is not None and bool(distributed.is_initialized())
    return Resources(frozenset(children_of(os.getpid())), _listening_ports(), tuple(variables), group_open)


def find(before: Resources, timeout: float = 2.0) -> list[str]:
    """Descriptions of the resources acquired since `before`. Processes that are exiting get some time."""
    deadline = time.monotonic() + timeout
    while (left := _difference(before, snapshot())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _difference(before: Resources, after: Resources) -> list[str]:
    left = [f"process {process} is still running" for process in sorted(after.children - before.children)]
    left += [f"port {port} is still open" for port in sorted(after.ports - before.ports)]
    had, has = dict(before.environment), dict(after.environment)
    left += [
        f"environment variable {name} was {had.get(name)!r} and is {has.get(name)!r}"
        for name in sorted(had.keys() | has.keys())
        if had.get(name) != has.get(name)
    ]
    if after.group_open and not before.group_open:
        left.append("a process group is still open")
    return left


def _listening_ports() -> frozenset[int]:
    """The ports on which this process listens. Each socket is asked: the tables of the kernel take 10 ms to read."""
    ports = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as copy:
                    if copy.family in _INTERNET and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        ports.add(copy.getsockname()[1])
        except OSError:  # it was closed meanwhile
            continue
    return frozenset(ports)
