"""Random training programs against plain PyTorch in one process: the table "Random programs" in docs/reliability.md.

    python benchmarks/random_programs.py                    # 3,000 programs
    python benchmarks/random_programs.py --first 500 --number 100
    python benchmarks/random_programs.py --only 17          # one program, with everything that it said

Exit status 1 if a program gives another result without a word, crashes, hangs, or is refused without reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["PACELINE_ALL_TESTS"] = "1"  # programs as long as in `make test-all`
import torch

import paceline.train.trainer  # noqa: F401  # before ranks are forked, so that it is imported once
from programs.outcome import VIOLATIONS, Outcome, try_program
from programs.program import draw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=3000)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--verbose", action="store_true", help="print every program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = options.only or range(options.first, options.first + options.number)
    began, kinds, words = time.perf_counter(), Counter[str](), Counter[str]()
    for number in numbers:
        outcome = try_program(draw(number))
        kinds[outcome.kind] += 1
        if outcome.kind in ("refused", "warned", "late"):
            words[f"{outcome.kind}: {outcome.text.splitlines()[0][:100]}"] += 1
        if outcome.is_violation or options.only or options.verbose:
            _show(outcome, whole=bool(options.only))
    for text, count in words.most_common():
        print(f"{count:5d}  {text}")
    seconds = time.perf_counter() - began
    print(
        f"{sum(kinds.values())} programs in {seconds:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    )
    return int(any(kind in VIOLATIONS for kind in kinds))


def _show(outcome: Outcome, *, whole: bool) -> None:
    text = outcome.text if whole else outcome.text.strip().splitlines()[-1][:220] if outcome.text.strip() else ""
    print(f"{outcome.kind:12s} {outcome.program}\n             {text} ({outcome.difference:.1e})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
