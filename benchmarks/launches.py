"""Launches that end badly: the table "Launches" in docs/reliability.md.

    python benchmarks/launches.py                          # 3,500: 3,000 of functions, 500 of scripts
    python benchmarks/launches.py --jobs 16                # at the same time
    python benchmarks/launches.py --first 500 --number 100
    python benchmarks/launches.py --only 17                # one of them, and what was drawn

Exit status 1 if a launch hangs, leaves a process, or reports something else than what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=3500)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--jobs", type=int, default=4)
    options = parser.parse_args()
    numbers = options.only or range(options.first, options.first + options.number)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_fork(job, numbers[job :: options.jobs], Path(folder)) for job in range(options.jobs)]
        failed = [os.waitpid(job, 0)[1] for job in jobs]
        counts = Counter[str]()
        for path in Path(folder).iterdir():
            counts.update(json.loads(path.read_text()))
    seconds = time.perf_counter() - began
    print(f"{counts['launches']} launches in {seconds:.0f} s: {counts['violations']} violations")
    for name, count in sorted(counts.items()):
        print(f"{count:6d}  {name}")
    return int(any(failed) or counts["violations"] > 0)


def _fork(job: int, numbers: Sequence[int], folder: Path) -> int:
    process = os.fork()
    if process:
        return process
    counts = Counter[str]()
    with launches.adopting():
        for number in numbers:
            plan = launches.draw(number)
            problem = launches.try_launch(plan)
            counts["launches"] += 1
            counts[f"launches of a {plan.kind}"] += 1
            counts["launches in which a rank dies"] += bool(plan.deeds)
            counts["launches that leave a child behind"] += bool(plan.leaves)
            counts[f"launches interrupted by {plan.signal or 'nothing'}"] += 1
            counts["violations"] += bool(problem)
            if problem:
                print(f"{number}: {problem}\n    {plan}", flush=True)
    (folder / str(job)).write_text(json.dumps(counts))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
