"""Large logs are read in bounded memory."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from paceline.diagnose.log_files import log_scan
from paceline.diagnose.log_files.log_scan import parse, rank_of_file
from paceline.diagnose.log_files.verdict import explain_log

STEP = b"2024-08-12 10:00:00 epoch 3 step %09d loss 2.3456 lr 0.0003 tokens/s 53211.2\n"
FAILURE = b"""\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/work/train.py", line 88, in main
[rank3]:     loss.backward()
[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat logs of 1 MiB as large."""
    monkeypatch.setattr(log_scan, "SMALL", 2**20)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("before", [0, 777, 40_000, 79_999])
def test_a_failure_in_a_large_log_is_found_with_its_line(before: int, tmp_path: Path) -> None:
    steps = b"".join(STEP % step for step in range(80_000))
    cut = len(STEP % 0) * before
    file = tmp_path / "train.log"
    file.write_bytes(steps[:cut] + FAILURE + steps[cut:])
    with file.open("rb") as opened:
        lines = list(log_scan.read(opened, "train.log", file.stat().st_size))
    assert len(lines) < 2 * log_scan._AFTER + 4
    found = next(line for line in lines if "illegal" in line.text)
    assert (found.number, found.rank) == (before + 4, 3)


@pytest.mark.usefixtures("small")
def test_a_flood_of_errors_does_not_hide_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scan, "_MAX_KEPT", 1000)
    flood = b"".join(b"step %d error_rate 0.01\n" % number for number in range(100_000))
    file = tmp_path / "train.log"
    file.write_bytes(flood + FAILURE)
    assert explain_log(str(file)).code == "cuda.illegal-address"


def test_a_line_without_an_end_is_read_in_pieces() -> None:
    lines = list(log_scan.read(io.BytesIO(b"x" * 3_000_000), "train.log", None))
    assert not lines  # nothing in it looks like a failure


def test_logs_in_a_folder_are_those_with_such_names_by_rank(tmp_path: Path) -> None:
    names = ["rank-10.log", "rank-2.log", "slurm-71.out", "model.pt", "config.yaml", "err"]
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in log_scan.log_files(tmp_path)] == ["err", "slurm-71.out", "rank-2.log", "rank-10.log"]


@pytest.mark.parametrize(
    ("raw", "rank", "node", "text"),
    [
        ("[rank3]: boom", 3, "", "boom"),
        ("[default12]:boom", 12, "", "boom"),
        ("3: boom", 3, "", "boom"),
        (" 7: boom", 7, "", "boom"),
        ("[1,5]<stderr>: boom", 5, "", "boom"),
        ("(RayTrainWorker pid=71, ip=10.0.0.2) [rank2]: boom", 2, "10.0.0.2", "boom"),
        ("worker-1: boom today", None, "worker-1", "boom today"),
        ("[node-b] [rank1]: boom", 1, "node-b", "boom"),
        ("2024-08-12T10:00:00.123Z stderr F [rank4]: boom", 4, "", "boom"),
        ("trainer-1  | boom", None, "", "boom"),
        ("\x1b[31m[rank0]: boom\x1b[0m\r\n", 0, "", "boom"),
        (" 10%|#   | 1/10\r 20%|##  | 2/10", None, "", " 20%|##  | 2/10"),
        ("gpu-7:812:901 [3] NCCL WARN boom", 3, "gpu-7", "gpu-7:812:901 [3] NCCL WARN boom"),
        ("[E ProcessGroupNCCL.cpp:828] [Rank 6] boom", 6, "", "[E ProcessGroupNCCL.cpp:828] [Rank 6] boom"),
        ("jinja2.exceptions.TemplateError: boom", None, "", "jinja2.exceptions.TemplateError: boom"),
        ("10: 20", None, "", "10: 20"),
    ],
)
def test_a_prefix_names_rank_and_node(raw: str, rank: int | None, node: str, text: str) -> None:
    line = parse("train.log", 1, raw)
    assert (line.rank, line.node, line.text) == (rank, node, text)


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("logs/rank-3.log", 3),
        ("rank_12.err", 12),
        ("attempt_0/4/stderr.log", 4),
        ("train.log", None),
        ("2024/x.log", None),
        ("lora_rank16/train.log", None),
        ("preproc2.log", None),
    ],
)
def test_a_file_may_belong_to_a_rank(path: str, rank: int | None) -> None:
    assert rank_of_file(path) == rank
