"""Time of `import paceline` and of `paceline --help`.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

IMPORT = "import time; t = time.perf_counter(); import paceline; print(time.perf_counter() - t)"


def import_seconds() -> float:
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)


def command_seconds(*args: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *args], capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    rounds = 11
    print(f"medians of {rounds}")
    print(f"  import paceline    {1000 * statistics.median(import_seconds() for _ in range(rounds)):.1f} ms")
    helps = [command_seconds("-m", "paceline", "--help") for _ in range(rounds)]
    bare = [command_seconds("-c", "pass") for _ in range(rounds)]
    print(f"  paceline --help    {statistics.median(helps):.3f} s (python itself {statistics.median(bare):.3f} s)")


if __name__ == "__main__":
    main()
