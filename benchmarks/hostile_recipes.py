"""Read generated recipes that are meant to harm: each must be accepted or refused with a code, in 2 s and 200 MB.

python benchmarks/hostile_recipes.py [COUNT] [FIRST_SEED]
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import hostile_recipes


def main(count: int = 10_000, first: int = 0) -> int:
    began, answers, problems = time.monotonic(), Counter[str](), 0
    slowest, largest = 0.0, 0
    for answer in hostile_recipes.read_all(range(first, first + count)):
        answers[answer.code or "accepted"] += 1
        slowest, largest = max(slowest, answer.seconds), max(largest, answer.megabytes)
        if answer.problem:
            problems += 1
            print(f"seed {answer.seed} ({answer.kind}): {answer.problem}", flush=True)
    print(f"{count} recipes in {time.monotonic() - began:.0f} s: {problems} problems")
    print(f"slowest {slowest:.2f} s, largest {largest} MB; " + ", ".join(f"{k} {n}" for k, n in answers.most_common()))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
