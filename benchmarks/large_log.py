"""How long `paceline explain` takes for a log of a gigabyte, and how much memory.

python benchmarks/large_log.py [--gigabytes 1]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from paceline.diagnose.log_files.verdict import explain_log

STEP = (
    b"[rank0]: 2024-08-12 10:00:00,123 INFO epoch 3 step %09d loss 2.3456 lr 0.0003 grad_norm 1.234 tokens/s 53211.2\n"
)
NOISE = b"2024-08-12 10:00:00,123 WARNING data: sample %09d failed to decode, skipping it\n"
FAILURE = b"""\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/work/train.py", line 88, in main
[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered
"""


def write(path: Path, size: int, *, noise: bool) -> None:
    """A failure in the middle of many steps; with `noise`, every tenth line looks like one."""
    lines = [(NOISE if noise and number % 10 == 0 else STEP) % number for number in range(100_000)]
    block = b"".join(lines)
    with path.open("wb") as file:
        while file.tell() < size // 2:
            file.write(block)
        file.write(FAILURE)
        while file.tell() < size:
            file.write(block)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    size = int(parser.parse_args().gigabytes * 1e9)
    print("| log | GB | seconds | peak MiB | found |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, noise in (("steps", False), ("every tenth line is a warning about a failure", True)):
            path = Path(folder) / "train.log"
            write(path, size, noise=noise)
            began = time.perf_counter()
            found = explain_log(str(path))
            seconds = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            cells = (name, f"{size / 1e9:.2f}", f"{seconds:.1f}", f"{peak:.0f}", f"{found.code}, rank {found.rank}")
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
