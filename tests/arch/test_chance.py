"""Tests that can't fail by chance: what CONTRIBUTING.md forbids in them, found in their code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FILES = sorted(path for path in TESTS.rglob("*.py") if path != Path(__file__))
FOREVER = 60.0  # seconds from which `sleep` does not wait for anything: a process stands still
CLOCKS = {"monotonic", "perf_counter", "thread_time", "process_time", "monotonic_ns", "perf_counter_ns"}
PICKING = re.compile(r"free_ports?\b")

# Sleeps that are left, scripts in strings included, by file. Only downward.
SLEEPS = {
    "faults/cgroups.py": 1, "faults/deaths.py": 2, "faults/frames.py": 4, "faults/hanging.py": 2,
    "faults/hangs.py": 3, "faults/healthy.py": 4, "faults/launches.py": 5, "faults/mismatches.py": 1,
    "faults/random_kills.py": 1, "faults/worlds.py": 1, "nodes.py": 4, "observed.py": 1,
    "ranks/test_collectives.py": 1, "ranks/test_launch_signals.py": 2, "ranks/test_notebook.py": 1,
    "ranks/test_rank_monitor.py": 1, "ranks/test_watch_command.py": 1, "system/slurm_cluster.py": 1,
    "system/ssh_server.py": 1, "system/test_page_in_browser.py": 2, "system/test_ray.py": 1,
    "system/test_ssh_launch.py": 1, "system/waiting.py": 1, "unit/monitor/test_stragglers.py": 1,
    "unit/train/test_throughput.py": 1,
}  # fmt: skip
# Measured times in assertions. Only downward.
DURATIONS = {
    "ranks/test_several_nodes.py": 1, "system/test_doctor_hosts.py": 2,
    "unit/diagnose/log_files/test_log_events.py": 1, "unit/tools/doctor/test_redact.py": 1,
    "unit/tools/watch/test_metric_series.py": 1,
}  # fmt: skip
# Ports that were free a moment ago. Only downward.
PORTS = {"system/ray_server.py": 1, "system/slurm_cluster.py": 1, "system/ssh_server.py": 1}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield path.relative_to(TESTS).as_posix(), ast.parse(path.read_text())


def name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def sleeps_in(tree: ast.Module) -> Iterator[str]:
    """Calls, also in the scripts that tests write, without those that last for ever."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node) == "sleep" and len(node.args) == 1:
            yield ast.unparse(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\btime\.sleep\(([^()\s]+)\)", node.value)


def is_short(argument: str) -> bool:
    try:
        return float(argument) < FOREVER
    except ValueError:
        return argument != "FOREVER"


def check(found: dict[str, int], allowed: dict[str, int]) -> None:
    """Whoever removes some lowers the numbers above."""
    assert {name: number for name, number in found.items() if number > allowed.get(name, 0)} == {}
    assert {name: number for name, number in allowed.items() if number > found.get(name, 0)} == {}


def test_no_test_sleeps() -> None:
    check({name: sum(map(is_short, sleeps_in(tree))) for name, tree in trees()}, SLEEPS)


def test_no_assertion_compares_measured_times() -> None:
    """Deadlines of loops and of `wait` are fine."""
    found = {
        name: sum(
            isinstance(call, ast.Call) and name_of(call) in CLOCKS and "deadline" not in (text := ast.unparse(node))
            and not re.search(r"\b(end|until)\b", text)
            for node in ast.walk(tree) if isinstance(node, ast.Assert)
            for call in ast.walk(node.test)
        )
        for name, tree in trees()
    }  # fmt: skip
    check(found, DURATIONS)


def test_no_test_picks_a_port_or_has_its_own() -> None:
    picked, fixed = dict[str, int](), list[str]()
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and PICKING.search(node.name) and not node.name.startswith("test_"):
                picked[name] = picked.get(name, 0) + 1
            if isinstance(node, ast.Call) and name_of(node) in ("bind", "listen", "create_server"):
                fixed += [f"{name}:{node.lineno}" for each in ast.walk(node) if is_port(each)]
    check(picked, PORTS)
    assert fixed == []


def is_port(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and 1024 < node.value < 65536


def test_nothing_is_run_again_until_it_passes() -> None:
    places = [ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "Makefile", *(ROOT / ".github").rglob("*.yml")]
    words = re.compile(r"rerun|flaky|--lf\b|--last-failed|pytest-retry", re.IGNORECASE)
    assert len(places) > 3
    assert [str(path) for path in places if words.search(path.read_text())] == []
    marked = [name for name, tree in trees() for node in ast.walk(tree) if is_rerun_mark(node)]
    assert marked == []


def is_rerun_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("flaky", "rerun") and "mark" in ast.unparse(node.value)
