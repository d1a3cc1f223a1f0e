"""Time from the command to the first all-reduce on two ranks: `paceline launch` and torchrun, interleaved.

python benchmarks/start_time.py [rounds]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print("first all-reduce at", time.time(), flush=True)
dist.destroy_process_group()
"""

COMMANDS = {
    "paceline launch": ["-m", "paceline", "launch", "-n", "2"],
    "paceline launch --fresh": ["-m", "paceline", "launch", "-n", "2", "--fresh"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def seconds_to_first_reduction(command: list[str], script: Path) -> float:
    started = time.time()
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1]) - started


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "reduce.py"
        script.write_text(SCRIPT)
        for _ in range(rounds):
            for name, command in COMMANDS.items():
                times[name].append(seconds_to_first_reduction(command, script))
    reference = statistics.median(times["torchrun"])
    print(f"seconds from command to first all-reduce, 2 ranks, {rounds} rounds interleaved")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"  {name:<24} median {median:.2f}  (min {min(values):.2f})  {median / reference:.2f} × torchrun")


if __name__ == "__main__":
    main()
