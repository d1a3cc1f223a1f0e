"""Exit statuses, fixes, and exits of ranks as JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from faults import cgroups
from paceline.diagnose import exits
from paceline.diagnose.exits import EXIT_STATUSES, FIXES, OomKillDetector, RankExit
from paceline.run.failures import FailureRecord

ERROR = {"family": "data", "name": "empty", "what": "It is empty.", "why": "", "fix": "fill it"}


def test_each_kind_has_an_exit_status_of_its_own_and_a_fix() -> None:
    assert len(set(EXIT_STATUSES.values())) == len(EXIT_STATUSES)
    assert FIXES.keys() - EXIT_STATUSES.keys() == {"signal", "exit"}


@pytest.mark.parametrize("record", [None, FailureRecord(3, 9.5, 1, "[data.empty] It is empty.", ERROR)])
def test_an_exit_reported_by_another_node_is_on_our_clock(record: FailureRecord | None) -> None:
    there = RankExit(3, 0, -9, 10.0, record, "saving", 12, "the last line")
    here = RankExit.from_json(json.loads(json.dumps(there.to_json())), node=1, clock_offset=2.5)
    assert here == RankExit(3, 1, -9, 12.5, record, "saving", 12, "the last line")
    assert here.error_code == ("data.empty" if record else "")


@pytest.mark.parametrize(
    ("code", "number", "name"),
    [(-11, 11, "SIGSEGV"), (137, 9, "SIGKILL"), (143, 15, "SIGTERM"), (3, 0, "signal 0"), (None, 0, "signal 0"),
     (-64, 64, "SIGRTMAX"), (-63, 63, "signal 63")],
)  # fmt: skip
def test_a_signal_is_read_from_the_status_of_a_process_or_of_a_shell(code: int | None, number: int, name: str) -> None:
    rank_exit = RankExit(0, 0, code, 1.0)
    assert (rank_exit.signal_number, rank_exit.signal_name) == (number, name)


def test_a_status_over_128_with_a_record_was_chosen_by_the_rank() -> None:
    assert RankExit(0, 0, 137, 1.0, FailureRecord(0, 1.0, 137, "rank 0 called sys.exit(137)\n")).signal_number == 0


def test_only_a_record_has_the_exact_time() -> None:
    assert RankExit(0, 0, 1, 5.0, FailureRecord(0, 5.0, 1, "Traceback")).earliest == 5.0
    assert RankExit(0, 0, -9, 5.0).earliest < 5.0


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = f"{GLOO}pair.cc:553] Connection closed by peer [10.0.0.2]:29082. This is typically caused by a remote worker"


def traceback(last: str, line: str = "step()") -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    {line}\n{last}\n'


@pytest.mark.parametrize(
    ("last", "signature"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "gpu-memory"),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE",
            "port-in-use",
        ),
        ("MemoryError", "cpu-memory"),
        (
            "RuntimeError: [enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9",
            "cpu-memory",
        ),
        ("ValueError: no MemoryError", None),
        ("OSError: [Errno 98] Address already in use", "port-in-use"),
        (CLOSED, "lost-connection"),
        (f"{GLOO}pair.cc:537] Read error [10.0.0.3]:16557: Connection reset by peer.", "lost-connection"),
        ("torch.distributed.DistBackendError: ncclRemoteError: A call failed", "lost-connection"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes.", "lost-connection"),
        (f"{GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete", "timeout"),
        (f"{GLOO}pair.cc:1] Application timeout caused pair closure", "timeout"),
        ("torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/0", "timeout"),
        ("torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients", "timeout"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", None),
        ("TimeoutError: timed out", None),
        ("ValueError: own", None),
    ],
)
def test_errors_of_torch_are_recognized_and_others_left_alone(last: str, signature: str | None) -> None:
    assert exits.classify(traceback(last), "") == signature


@pytest.mark.parametrize(
    ("code", "signature"),
    [
        ("train.out-of-memory", "gpu-memory"),
        ("world.port-in-use", "port-in-use"),
        ("world.different-versions", "version-mismatch"),
        ("launch.node-differs", "version-mismatch"),
        ("data.no-such-file", None),
    ],
)
def test_codes_are_recognized(code: str, signature: str | None) -> None:
    assert exits.classify(f"[{code}] It went wrong.", code) == signature


def test_of_chained_exceptions_the_first_counts() -> None:
    then = "\nDuring handling of the above exception, another exception occurred:\n\n"
    own, lost = traceback("ValueError: own"), traceback(CLOSED)
    assert exits.classify(own + then + lost, "") is None
    assert exits.classify(lost + then + own, "") == "lost-connection"


def test_source_lines_quoted_by_a_traceback_are_ignored() -> None:
    assert exits.classify(traceback("RuntimeError: own", 'retry("address already in use")'), "") is None


def test_the_exception_of_a_traceback_and_the_peers_it_names() -> None:
    assert exits.exception_name(traceback("torch.OutOfMemoryError: CUDA")) == "torch.OutOfMemoryError"
    assert exits.exception_name("killed") == "killed" and exits.exception_name("") == ""
    both = f"{CLOSED}\nnet error node-b<50123> remote"
    assert exits.peers(both) == ["10.0.0.2:29082", "node-b:50123"]


def test_the_rank_whose_error_is_repeated() -> None:
    assert exits.blamed_rank("Saving failed on rank 3: ValueError: own") == 3
    assert exits.blamed_rank("Saving failed") is None


def test_a_kill_by_the_kernel_leaves_evidence_and_another_kill_none() -> None:
    with cgroups.required() as cgroup:
        detector = OomKillDetector()
        victims = [_killed("kill", cgroup), _killed("allocate", cgroup), _killed("kill", cgroup)]
        assert detector.killed(victims) == {victims[1]}
        assert OomKillDetector().killed(victims) == set()


def _killed(how: str, cgroup: str) -> int:
    """The pid of a process that ended by SIGKILL, sent by itself or by the kernel."""
    body = f"import os, pathlib; pathlib.Path({cgroup!r}, 'cgroup.procs').write_text(str(os.getpid()))\n" + (
        "os.kill(os.getpid(), 9)" if how == "kill" else "bytearray(os.urandom(1 << 20) * 512)"
    )
    process = subprocess.Popen([sys.executable, "-c", body])
    assert process.wait(60) == -signal.SIGKILL
    return process.pid
