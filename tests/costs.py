"""What the tests cost, by ring, by file and by test: `make test` ends with a table.

Every report carries the CPU time of its test: that of this worker and of the processes that ended meanwhile. The
process that hands out the tests adds up what the workers report.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_KEY = "cost"  # in user_properties, which pytest-xdist sends along


def _used() -> tuple[float, float]:
    """CPU seconds of this process and its children, and how many of them were spent in the kernel."""
    times = os.times()
    waiting, waiting_kernel = sys.modules["worlds"].used() if "worlds" in sys.modules else (0.0, 0.0)
    kernel = times.system + times.children_system + waiting_kernel
    return times.user + times.children_user + times.system + times.children_system + waiting, kernel


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # A list, which teardown fills: the call's report refers to it by then, but has been sent.
    item.stash[_START] = (*_used(), time.perf_counter())
    return (yield)


_START = pytest.StashKey[tuple[float, float, float]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "teardown":
        cpu, kernel, began = item.stash[_START]
        now = _used()
        cost = (now[0] - cpu, now[1] - kernel, time.perf_counter() - began)
        report.user_properties = [*report.user_properties, (_KEY, cost)]
    return report


class Table:
    """Adds up, and prints. Registered in the process that shows the results."""

    def __init__(self) -> None:
        self.files: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        self.tests: dict[str, float] = {}
        self.began = time.perf_counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = dict(report.user_properties).get(_KEY)
        if cost is not None:
            row = self.files[report.nodeid.partition("::")[0]]
            self.tests[report.nodeid] = cost[0]
            for place, value in enumerate((1, *cost)):
                row[place] += value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rings: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        for name, row in self.files.items():
            rings[_ring(name)] = [a + b for a, b in zip(rings[_ring(name)], row, strict=True)]
        if sum(row[0] for row in rings.values()) < 100:
            return
        rings["sum"] = [sum(column) for column in zip(*rings.values(), strict=True)]
        write = terminalreporter.write_line
        write(f"{'ring':14}{'tests':>7}{'CPU s':>8}{'kernel':>8}{'test s':>8}")
        for ring, (tests, cpu, kernel, wall) in sorted(rings.items(), key=lambda row: row[1][1]):
            write(f"{ring:14}{tests:7.0f}{cpu:8.0f}{kernel:8.0f}{wall:8.0f}")
        dearest = sorted(self.files.items(), key=lambda row: -row[1][1])[:25]
        write("the dearest files: " + ", ".join(f"{Path(name).name} {row[1]:.0f} s" for name, row in dearest))
        write("the dearest tests:")
        for name in sorted(self.tests, key=self.tests.__getitem__, reverse=True)[:60]:
            write(f"{self.tests[name]:8.1f} s  {name.removeprefix('tests/')}")
        write(f"elapsed: {time.perf_counter() - self.began:.0f} s")


def _ring(nodeid: str) -> str:
    parts = Path(nodeid).parts
    return parts[1] if len(parts) > 2 else "tests"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table())
