"""Prefixes of launchers."""

from __future__ import annotations

import pytest

from paceline.diagnose.log_files.log_lines import parse, rank_of_file


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
