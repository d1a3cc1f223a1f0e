"""The tables of "Mismatched collectives" in docs/reliability.md. Exit status 1 if debug mode misses a mismatch.

    python benchmarks/mismatches.py --programs 300
    python benchmarks/mismatches.py --programs 300 --modes debug
    python benchmarks/mismatches.py --only 17 --modes debug       # one program, with its text
    python benchmarks/mismatches.py --cost                        # of a check

Programs of 5 to 40 collectives on 2 or 3 ranks with one mismatch (tests/faults/mismatches.py), drawn from their number.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as torch_dist

import paceline
from faults import mismatches
from paceline import dist

_OUTCOMES = ("caught", "bad value", "hang", "abort", "error", "silent")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--only", type=int)
    parser.add_argument("--modes", nargs="*", choices=mismatches.MODES, default=mismatches.MODES)
    parser.add_argument("--timeout", type=float, default=5.0, help="of collectives, in seconds")
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    if options.cost:
        print(*paceline.launch(cost, ranks=2), sep="\n")
        return 0
    torch.set_num_threads(1)
    seeds = range(options.programs) if options.only is None else [options.only]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="paceline-mismatches-") as name:
        for mode in options.modes:
            failed += _measure(mode, seeds, Path(name), options.timeout, whole=options.only is not None)
    return int(failed > 0)


def _measure(mode: mismatches.Mode, seeds: range | list[int], folder: Path, timeout: float, *, whole: bool) -> int:
    outcomes, kinds, wrong_lines, seconds = Counter[str](), Counter[str](), 0, []
    for seed in seeds:
        program = mismatches.draw(seed)
        result = mismatches.run(program, mode, folder, timeout)
        outcomes[result.outcome] += 1
        kinds[f"{program.kind}, {result.outcome}"] += 1
        lines = result.outcome != "caught" or mode == "DETAIL" or result.names_both_lines()
        wrong_lines += not lines
        seconds += [max(rank.seconds for rank in result.ranks)] if result.outcome == "caught" else []
        if whole or (mode == "debug" and (result.outcome != "caught" or not lines)):
            print(f"program {seed}, {program.kind} at call {program.at} on rank {program.who}: {result.outcome}")
            print(*(f"  rank {rank}: {each}" for rank, each in enumerate(result.ranks)), sep="\n", flush=True)
            if whole:
                print(program.source())
    median = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    print(
        f"| {mode} | " + " | ".join(str(outcomes[each]) for each in _OUTCOMES) + f" | {wrong_lines} | {median:.2f} s |"
    )
    print(*(f"    {kind}: {count}" for kind, count in sorted(kinds.items())), sep="\n", flush=True)
    return len(seeds) - outcomes["caught"] + wrong_lines if mode == "debug" else 0


def cost() -> list[str]:
    """Microseconds of an all-reduce of one number on 2 ranks of this machine: medians of interleaved rounds."""
    number = torch.ones(1)
    ways: dict[str, tuple[bool, Callable[[], object]]] = {
        "torch.distributed": (False, lambda: torch_dist.all_reduce(number)),
        "torch.distributed, debug mode": (True, lambda: torch_dist.all_reduce(number)),
        "paceline.dist, after the first 32": (False, lambda: dist.all_reduce(number)),
        "paceline.dist, debug mode": (True, lambda: dist.all_reduce(number)),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(32):
        dist.all_reduce(number)
    for _ in range(20):
        for name, (debug, call) in ways.items():
            dist.debug(debug)
            call()
            began = time.perf_counter()
            for _ in range(20):
                call()
            found[name].append((time.perf_counter() - began) / 20 * 1e6)
    return [f"| {name} | {median(values):.0f} µs |" for name, values in found.items()]


if __name__ == "__main__":
    sys.exit(main())
