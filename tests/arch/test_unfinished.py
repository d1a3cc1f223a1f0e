"""A test that hangs can be understood from its report alone (stacks.py, unfinished.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import stacks
from stacks import Process, Seen

ROOT = Path(__file__).parents[2]
RANK = """Process {pid}: python -c from execnet import serve
Python v3.11.2 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3000)
    {step}
    test_two_ranks (test_it.py:30)
    pytest_pyfunc_call (_pytest/python.py:166)
    _multicall (pluggy/_callers.py:121)
    main (<string>:1)
Thread {monitor} (idle): "rank watch"
    wait (threading.py:331)
    run (paceline/diagnose/hang/rank_monitor.py:88)
"""


def rank(number: int, step: str, output: str = "/tmp/said-0 (7)") -> Process:
    dump = RANK.format(pid=100 + number, monitor=200 + number, step=step)
    return Process(100 + number, 99, f"pl-rank-{number}", 940.0, dump, output)


def test_each_stack_is_shown_once_with_the_processes_that_share_it() -> None:
    ranks = [rank(0, "step (train.py:7)"), rank(1, "step (train.py:7)"), rank(2, "save (train.py:9)")]
    shown = stacks.report(Seen("test", 1000.0, ranks, {"/tmp/said-0 (7)": "it trains"}))
    assert shown.count("(60 s), child of 99: pl-rank-") == 3
    assert shown.count("stack of ") == 3
    assert "stack of 100, 101:\n    all_reduce (torch/distributed/distributed_c10d.py:3000)\n    step" in shown
    assert "stack of 102:\n" in shown and "stack of 100 rank watch, 101 rank watch, 102 rank watch:\n" in shown
    assert "test_two_ranks (test_it.py:30)" in shown and "pluggy" not in shown and "_pytest" not in shown
    assert shown.endswith("the end of /tmp/said-0 (7), the output of 100, 101, 102:\n    it trains")


def test_a_report_of_many_ranks_stays_short() -> None:
    ranks = [rank(number, f"step_{number} (train.py:7)", f"/tmp/said-{number}") for number in range(40)]
    outputs = {f"/tmp/said-{number}": "\n".join(map(str, range(25))) for number in range(40)}
    lines = stacks.report(Seen("test", 1000.0, ranks, outputs)).splitlines()
    assert len(lines) == stacks.LINES
    assert any("step_0 " in line for line in lines) and any("the end of /tmp/said-0," in line for line in lines)


def test_a_process_without_python_frames_is_told_by_what_py_spy_said() -> None:
    assert stacks.threads("Error: Failed to find python\n") == [("MainThread", ("Error: Failed to find python",))]


def test_what_says_nothing_is_left_out() -> None:
    """Outputs without a line, threads of pytest, and the name of a thread that py-spy could not read."""
    dump = 'Thread 7 (idle)\n    wait (a.py:1)\nThread 8 (idle): "x"\n    run (execnet/gateway_base.py:3)\n'
    shown = stacks.report(Seen("test", 1000.0, [Process(7, 1, "rank 0", 1.0, dump, "/tmp/a")], {"/tmp/a": " \n"}))
    assert "stack of 7:\n    wait (a.py:1)" in shown and shown.count("stack of") == 1 and "/tmp/a" not in shown


HANGING = """
import os, subprocess, sys
import pytest, unfinished
from system.waiting import eventually

CODE = '''
import os, sys
def wait_for_the_others():
    sys.stdin.read()
print("rank says")
os.close(2)
wait_for_the_others()
'''

@pytest.mark.parametrize("is_killed", [False, True])
def test_it(request, tmp_path, is_killed):
    (tmp_path / "said-0").write_text("the launcher says")
    with (tmp_path / "output").open("wb") as output, subprocess.Popen(
        [sys.executable, "-u", "-c", CODE], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE
    ) as rank:
        rank.stderr.read()  # until it has printed
        unfinished._tell(request.config, f"0 {request.node.nodeid}")  # its time is over
        file = unfinished._file(request.config)
        eventually(lambda: file.exists() and file.read_text().endswith("\\n"))
        if is_killed:
            os._exit(1)  # as pytest-timeout does where there are no signals
        rank.kill()
    pytest.fail("too late")
"""


def test_a_test_that_hangs_is_reported_even_if_its_worker_was_killed(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "unfinished", "-p", "no:paceline", "--rootdir", "."]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--basetemp", "base", "--max-worker-restart", "0", "test_hanging.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=110,
    )
    first, _, second = done.stdout.partition("crashed while running")
    assert done.returncode == 1 and second, done.stdout + done.stderr
    for report in (first, second):
        assert report.count(" processes of this test ") == 1, report
        assert report.count("wait_for_the_others") >= 1 and report.count("    rank says") == 1, report
    assert first.count("the launcher says") == 1


@pytest.mark.parametrize("test", ["one", "other"])
def test_what_was_seen_is_kept_by_test(test: str, tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    file.write_text(
        "".join(json.dumps(asdict(Seen(name, 1.0, [rank(0, "x")], {}))) + "\n" for name in ("one", "other"))
    )
    assert stacks.read(file, test) == [Seen(test, 1.0, [rank(0, "x")], {})]
    assert stacks.read(tmp_path / "nothing", test) == []
    file.write_text(file.read_text()[:-1])  # as long as it is being written
    assert stacks.read(file, "other") == []
