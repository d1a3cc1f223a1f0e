"""The report of a test that failed says where its processes were, and what its launchers said.

A process beside the tests (stacks.py) looks at a test that is about to pass its time limit. What it saw is added to the
test's report by the worker, or, if that was killed as well, by the process that hands out the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import stacks

_TITLE = "processes of this test"
_WATCHER = pytest.StashKey["subprocess.Popen[bytes]"]()
_SAID = 40  # lines of a launcher


def _file(config: pytest.Config) -> Path:
    """Of this worker, where the process that hands out the tests finds it."""
    is_worker = hasattr(config, "workerinput")
    name = f"{os.getppid()}-{config.workerinput['workerid']}" if is_worker else f"{os.getpid()}-alone"
    return Path(tempfile.gettempdir()) / f"paceline-stacks-{name}.jsonl"


def _runs_tests(config: pytest.Config) -> bool:
    return not config.getoption("numprocesses", None) or hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if _runs_tests(session.config):
        command = [sys.executable, stacks.__file__, str(os.getpid()), str(_file(session.config))]
        session.config.stash[_WATCHER] = subprocess.Popen(command, stdin=subprocess.PIPE)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if watcher := session.config.stash.get(_WATCHER, None):
        watcher.kill()
        watcher.communicate()
        _file(session.config).unlink(missing_ok=True)
    else:
        for file in _files_of_workers():
            file.unlink()


def _files_of_workers() -> Iterable[Path]:
    return Path(tempfile.gettempdir()).glob(f"paceline-stacks-{os.getpid()}-*.jsonl")


def _tell(config: pytest.Config, line: str) -> None:
    if (watcher := config.stash.get(_WATCHER, None)) and watcher.stdin:
        with suppress(BrokenPipeError):  # somebody has killed it; tests go on
            watcher.stdin.write(f"{line}\n".encode())
            watcher.stdin.flush()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Without an answer, so that pytest-timeout sets its timer."""
    _tell(item.config, f"{settings.timeout} {item.nodeid}")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    _tell(item.config, "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        file = _file(item.config)
        report.sections += [(_TITLE, stacks.report(seen)) for seen in stacks.read(file, item.nodeid)]
        file.unlink(missing_ok=True)
        told = "\n".join([report.longreprtext, *(text for _, text in report.sections)])
        report.sections += _said_by_launchers(item, told)
    return report


def _said_by_launchers(item: pytest.Item, known: str) -> Iterable[tuple[str, str]]:
    """The output of every nodes.Launcher of the test that its report does not have already."""
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    for path in sorted(folder.rglob("said-*")) if folder else ():
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        if lines and lines[-1] not in known:
            yield f"the end of {path.relative_to(folder)}, said by a launcher", "\n".join(lines[-_SAID:])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """A worker has ended in a test: its own timer killed it, or something else did."""
    for file in _files_of_workers():
        report.sections += [(_TITLE, stacks.report(seen)) for seen in stacks.read(file, crashitem)]
