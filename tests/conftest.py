"""What all tests share. Leaks are watched by the plugin (`--no-leaks`, set in pyproject.toml)."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Tests start ranks: each gets one thread, and helpers beside the tests (tiny.py) and in tools/ can be imported by name.
os.environ["OMP_NUM_THREADS"] = "1"
if "PACELINE_GPU_TESTS" not in os.environ:  # `make gpu` sets it; all other tests are about CPU ranks
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's `make test &`; ranks and launchers inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest

import warm
from samples import ALL

gc.disable()  # until tests are collected: see pytest_collection_finish

pytest_plugins = ["costs", "unfinished"]


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process that hands tests to the workers of pytest-xdist runs none."""
    if session.config.getoption("numprocesses", None):
        gc.enable()  # it collects none either
    else:
        warm.import_what_ranks_need()


def pytest_collection_finish() -> None:
    """A process of tests holds half a million objects that never become garbage. To look at them again and again was a
    seventh of the CPU time of all tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    if "worlds" in sys.modules:
        sys.modules["worlds"].end_ranks()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: part of `make test-all` only; another test keeps the guarantee")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of `make test-all` are deselected elsewhere, not skipped: a skip says that something is missing here."""
    if not ALL:
        later = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in set(later)]
    items[:] = _those_that_fork_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _those_that_fork_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """A process of tests doubles in size until its end, and forks take longer with it. Workers of pytest-xdist begin
    with equal parts of the list; tests of a file stay together, which share what its fixtures start."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for forks in (True, False):
        for number, tests in enumerate(tests for path, tests in files.items() if ("unit" not in path.parts) == forks):
            parts[number % workers].extend(tests)
    return [item for part in parts for item in part]


@pytest.fixture(autouse=True)
def paceline_no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """As the plugin does, except that a test may leave ranks that wait for the next one."""
    import worlds
    from paceline.tools.testing import plugin

    worlds.fixtures = frozenset(request.fixturenames)
    before = plugin.snapshot()
    yield
    leaked = plugin.find(dataclasses.replace(before, children=before.children | worlds.processes()))
    if leaked:
        pytest.fail("the test leaked resources: " + "; ".join(leaked), pytrace=False)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, so that runs/ lands nowhere else."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
