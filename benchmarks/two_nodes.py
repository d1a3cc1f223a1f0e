"""Two machines (network namespaces): their link is cut and healed, and Ctrl-C is pressed twice while a rank of the
other one hangs in a lock.

    python benchmarks/two_nodes.py [--rounds 20] [--only cut]

Exit status 1 if a side ends with another verdict, later than it says, or leaves a process. Needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny  # noqa: F401  # once, before launchers are forked
from nodes import Job
from paceline.launcher.local import agent as _agent  # noqa: F401
from system import two_nodes
from system.namespaces import Machine

CUTS = (1.0, 2.5, 4.5, 5.5, 8.0, 12.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("cut", "interrupt"))
    options = parser.parse_args()
    chance, failed = random.Random(0), 0
    for number in range(options.rounds):
        seconds = CUTS[number % len(CUTS)] * chance.uniform(0.9, 1.1)
        lock, node = two_nodes.LOCKS[number % 3], number % 2
        cases: dict[str, Callable[[Job, Machine], list[str]]] = {
            f"cut for {seconds:.1f} s": partial(two_nodes.cut_and_heal, seconds=seconds),
            f"interrupt twice, node {node}, {lock}": lambda job, _, lock=lock, node=node: two_nodes.interrupt_twice(
                job, lock, node
            ),
        }
        for name, run in cases.items():
            if options.only and not name.startswith(options.only):
                continue
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder, two_nodes.joined(Path(folder)) as (job, machine):
                wrong = run(job, machine)
            failed += bool(wrong)
            print(f"{number:3d}  {name}: {time.monotonic() - began:.1f} s  {'WRONG' if wrong else 'ok'}", flush=True)
            if wrong:
                print("\n".join(wrong), flush=True)
    print(f"{failed} violations")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
