"""What is found in the logs of real kinds of failure.

Each set was written after public threads by somebody who did not know the patterns. What was found in it at first is in
docs/errors/README.md.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.diagnose.log_files.verdict import LogVerdict, explain_log, explain_text
from paceline.errors import PacelineError

LOGS = Path(__file__).parent
# Of 222: the log hardly tells, several ranks fail alike, or the rank is there and was not found.
RANKS_NOT_FOUND = 20


def wanted(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((LOGS / name / "expected.json").read_text())
    return found


def explain(*parts: str) -> LogVerdict:
    return explain_log(str(LOGS.joinpath(*parts)))


SETS = ("first", "second", "third", "fourth", "fifth")
NOT_FOUND = ("node1_store_gone.log",)  # only warnings, which torch also prints when a healthy run ends
CASES = [
    (folder, name, each["code"]) for folder in SETS for name, each in wanted(folder).items() if name not in NOT_FOUND
]


@pytest.mark.parametrize(("folder", "name", "code"), CASES)
def test_the_cause_of_a_log_is_found(folder: str, name: str, code: str) -> None:
    assert explain(folder, name).code == code


def test_the_rank_that_failed_first_is_named() -> None:
    coded = [(folder, name) for folder, name, code in CASES if code not in ("unknown", "none")]
    # In the last two sets, only logs of which one rank can be told have one.
    coded = [(folder, name) for folder, name in coded if folder in SETS[:3] or wanted(folder)[name]["rank"] is not None]
    assert len(coded) == 222
    wrong = [name for folder, name in coded if explain(folder, name).rank != wanted(folder)[name]["rank"]]
    assert len(wrong) <= RANKS_NOT_FOUND, wrong


def test_enough_kinds_of_failure_are_tried() -> None:
    codes = [code for _, _, code in CASES]
    assert len({*codes} - {"unknown", "none"}) > 100
    assert codes.count("unknown") + codes.count("none") == 72


def test_a_consequence_counts_only_if_there_is_nothing_else() -> None:
    lost = "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3411"
    assert explain_text(lost).code == "gloo.lost-peer"
    killed = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL"
    found = explain_text(f"{lost}\n{killed}")
    assert (found.code, found.rank) == ("process.killed", 1)
    oom = "[ 8121.55] Out of memory: Killed process 4711 (python) total-vm:91231231kB"
    assert explain_text(f"{lost}\n{killed}\n{oom}").code == "host.oom-killer"


def test_the_rank_that_others_waited_for_is_the_one_that_is_missing() -> None:
    line = (
        "[rank{0}]:[E812 10:00:00 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    )
    call = "WorkNCCL(SeqNum={}, OpType={}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600024 milliseconds"
    waiting = [line.format(rank) + call.format(418, "ALLREDUCE") for rank in (0, 1, 3)]
    assert explain_text("\n".join(waiting)).rank == 2
    other = line.format(2) + call.format(418, "BROADCAST")
    assert explain_text("\n".join([*waiting, other])).rank == 2


def test_the_first_known_exception_of_a_chain_counts() -> None:
    chain = """\
Traceback (most recent call last):
  File "/work/cache.py", line 8, in get
    return self.entries[key]
KeyError: 'model-00001'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/work/train.py", line 80, in main
    save()
OSError: [Errno 28] No space left on device: 'model-00001.pt'
"""
    found = explain_text(chain)
    assert (found.code, found.place) == ("host.no-space", "/work/cache.py:8, in get")


def test_an_error_that_training_survived_is_not_the_cause() -> None:
    steps = "".join(f"epoch 0 step {step} loss 2.{step} lr 0.1\n" for step in range(4))
    oom = "ERROR CUDA out of memory. Tried to allocate 2.00 GiB\n"
    assert explain_text(oom + steps).code == "none"
    end = "Traceback (most recent call last):\n  File 'a.py', line 1, in f\nKeyError: 'lr'\n"
    assert explain_text(oom + steps + end).code == "unknown"
    assert explain_text(steps + oom).code == "cuda.out-of-memory"


def test_a_code_of_paceline_is_found_in_its_output() -> None:
    found = explain_text(
        "rank 1 failed first (log: runs/x/logs/rank-1.log): exception\n[data.empty] No samples.\n  fix: add some\n"
    )
    assert (found.code, found.rank) == ("data.empty", 1)


def test_the_logs_of_ranks_are_read_from_a_folder(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "stderr.log").write_text("RuntimeError: Connection reset by peer\n")
    (tmp_path / "1" / "stderr.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    (tmp_path / "model.safetensors").write_bytes(b"CUDA error: device-side assert triggered")
    found = explain_log(str(tmp_path))
    assert (found.code, found.rank) == ("cuda.out-of-memory", 1)


def test_standard_input_and_its_json(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"[default2]:RuntimeError: Address already in use\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    found = explain_log("-").to_json()
    assert (found["code"], found["rank"], found["line"]) == ("rendezvous.port-in-use", 2, 1)
    json.dumps(found)


@pytest.mark.parametrize("damage", ["binary", "truncated", "interleaved", "one line"])
def test_a_damaged_log_does_not_break_it(damage: str, tmp_path: Path) -> None:
    raw = (LOGS / "first" / "unused-parameters-only-on-rank-3.log").read_bytes()
    lines = raw.splitlines(keepends=True)
    damaged = {
        "binary": b"\x00\xff\xfe\x1b[31m" * 5000 + raw + bytes(range(256)) * 100,
        "truncated": raw[len(raw) // 3 :],
        "interleaved": b"".join(line for pair in zip(lines, reversed(lines), strict=True) for line in pair),
        "one line": raw.replace(b"\n", b" ") * 50,
    }[damage]
    file = tmp_path / "train.log"
    file.write_bytes(damaged)
    found = explain_log(str(file))
    assert found.code == "ddp.unused-parameters" or damage == "one line"


STEPS = "".join(f"epoch 0 step {step} loss 2.{step} lr 0.1\n" for step in range(40))


@pytest.mark.parametrize(
    "line",
    [
        "gpu-1:12:40 [0] NCCL WARN [Service thread] Accept failed Resource temporarily unavailable",
        "I0812 10:00:00.123 ProcessGroupNCCL.cpp:900] HeartbeatMonitor environments: TORCH_NCCL_ENABLE_MONITORING: 1",
        "[I ProcessGroupWrapper.cpp:562] [Rank 0] Running collective: CollectiveFingerPrint(OpType=ALLREDUCE)",
        "Registered handlers for SIGTERM and SIGHUP",
        "no NaN found in weights",
        "NaN found: 0",
        "Loss is inferred from the labels",
        "Evicted 12 shards from the local cache",
        "trial 12 is infeasible",
        "waiting for clients to connect",
        "{'kill_signal': 'SIGKILL'}",
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99).",
    ],
)
def test_a_harmless_line_is_no_failure(line: str) -> None:
    assert explain_text(f"{line}\n").code == "none"
    real = "[rank1]: ValueError: bad fold\n"
    assert explain_text(f"{line}\n[rank1]: Traceback (most recent call last):\n{real}").code == "unknown"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)", "nccl.system-error"),
        ("OSError: [Errno 28] No space left on device: runs/resume-1/ckpt.pt", "host.no-space"),
        ("DistStoreError: Timed out initializing process group in store based barrier on rank 0 (num_workers_joined=3)",
         "rendezvous.timeout"),
        ("BlockingIOError: [Errno 11] unable to lock file, 'Resource temporarily unavailable'", "unknown"),
        ("requests.exceptions.ConnectionError: api.wandb.ai: Name or service not known", "unknown"),
        ("urllib3.exceptions.ProtocolError: ('Connection broken: ConnectionResetError(104)', 1)", "unknown"),
        ("ValueError: Invalid rank for LoRA", "unknown"),
        ("eglInitialize: EGL initialization error", "none"),
    ],
)  # fmt: skip
def test_a_line_has_the_code_of_its_writer(line: str, code: str) -> None:
    assert explain_text(line).code == code


def test_progress_of_another_log_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "slurm-101.out").write_text("Traceback (most recent call last):\nRuntimeError: CUDA out of memory.\n")
    (tmp_path / "slurm-102.out").write_text(STEPS)
    assert explain_log(str(tmp_path)).code == "cuda.out-of-memory"


def test_an_error_in_a_long_run_may_be_survived(tmp_path: Path) -> None:
    steps = [f"{{'loss': 2.{step:04}, 'learning_rate': 0.1, 'epoch': 0.1}}\n" for step in range(2000)]
    file = tmp_path / "train.log"
    file.write_text(
        "".join([*steps[:1000], "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n", *steps[1000:]])
    )
    assert explain_log(str(file)).code == "none"


def test_what_follows_a_long_progress_bar_is_read(tmp_path: Path) -> None:
    bar = "\r".join(f" {step}%|##| {step}/100 [00:01<00:02, 3.1it/s]" for step in range(90))
    file = tmp_path / "train.log"
    file.write_text(
        f"{bar}slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2024-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
    )
    assert explain_log(str(file)).code == "slurm.time-limit"


def test_compressed_and_utf_16_logs_are_read(tmp_path: Path) -> None:
    text = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n"
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.log").write_bytes(text.encode("utf-16"))
    assert {explain_log(str(tmp_path / name)).code for name in ("a.log.gz", "b.log")} == {"cuda.out-of-memory"}


def test_a_device_and_a_folder_without_logs_are_refused(tmp_path: Path) -> None:
    for path in ("/dev/zero", str(tmp_path)):
        with pytest.raises(PacelineError, match=r"\[paceline.no-logs\]"):
            explain_log(path)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("Killed\n"))
    writer.start()
    assert explain_log(str(pipe)).code == "process.killed"
    writer.join()
