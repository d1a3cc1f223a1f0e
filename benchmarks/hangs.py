"""The tables of "Hangs" in docs/reliability.md. Exit status 1 if less than 99 % are right or a report comes too late.

    python benchmarks/hangs.py --runs 25 [--kinds sleep,gil]
    python benchmarks/hangs.py --replay sleep:17                  # one of them, with the report
    python benchmarks/hangs.py --plain                            # scripts that do not import paceline
    python benchmarks/hangs.py --torchrun [--kinds sleep,gil]     # what torchrun says of the same plain scripts

Each run is drawn from its kind and number (tests/faults/hangs.py): rank, step, layout and place. Results are appended
to benchmarks/hangs.jsonl, and an interrupted campaign continues; `--fresh` starts a new one. It needs root: the disk
that stalls is a loop device, and the nodes are network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny  # noqa: F401  # once, before launchers are forked
from faults import hangs
from paceline.launcher.local import agent as _agent  # noqa: F401

RESULTS = Path(__file__).with_suffix(".jsonl")
RIGHT, MEDIAN, MOST = 0.99, 3.0, 10.0  # fraction, seconds, seconds
TORCHRUN_TIMEOUT, TORCHRUN_PATIENCE = 20.0, 75.0  # seconds


def one(kind: str, number: int, plain: bool) -> hangs.Result:
    with tempfile.TemporaryDirectory(prefix="paceline-hang-", ignore_cleanup_errors=True) as folder:
        return hangs.run(hangs.draw(kind, number, plain), Path(folder))


def campaign(kinds: Iterable[str], runs: int, plain: bool, results: Path) -> list[hangs.Result]:
    """Run what is missing."""
    lines = results.read_text().splitlines() if results.exists() else []
    known = {(each["kind"], each["number"]): hangs.Result(**each) for each in map(json.loads, lines)}
    for number in range(runs):
        for kind in kinds:
            if (kind, number) in known:
                continue
            result = one(kind, number, plain)
            known[kind, number] = result
            with results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            if not result.is_right:
                print(f"{kind}:{number}: {result.problem[-600:]}\n{result.text}\n", file=sys.stderr, flush=True)
    return [result for (kind, number), result in known.items() if kind in kinds and number < runs]


def table(results: list[hangs.Result]) -> bool:
    """Print it; whether all is as promised."""
    print("| kind | runs | rank right | collective right | both lines right | seconds: median | most |")
    print("|---|---|---|---|---|---|---|")
    for kind in (*hangs.KINDS, "all"):
        found = [result for result in results if kind in (result.kind, "all")]
        if found:
            print(f"| {kind} | {len(found)} | {_row(found)} |")
    seconds = _seconds(results)
    right = sum(result.is_right for result in results) / len(results)
    return right >= RIGHT and statistics.median(seconds) <= MEDIAN and max(seconds) <= MOST


def _row(found: list[hangs.Result]) -> str:
    right = [sum(getattr(result, name) for result in found) for name in ("rank", "collective", "lines")]
    seconds = _seconds(found)
    return " | ".join([*map(str, right), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"])


def _seconds(found: list[hangs.Result]) -> list[float]:
    return [float("inf") if result.seconds is None else result.seconds for result in found]


def torchrun(kinds: Iterable[str]) -> None:
    """Two of each, with a shorter timeout."""
    print(f"timeout of collectives: {TORCHRUN_TIMEOUT:g} s; killed {TORCHRUN_PATIENCE:g} s after the fault")
    print("| kind | layout | rank at fault | seconds until it ends | says |\n|---|---|---|---|---|")
    for kind in kinds:
        for number in (1, 2):
            plan = replace(hangs.draw(kind, number, plain=True), timeout=TORCHRUN_TIMEOUT)
            with tempfile.TemporaryDirectory(prefix="paceline-hang-", ignore_cleanup_errors=True) as folder:
                ending = hangs.run_with_torchrun(plan, Path(folder), TORCHRUN_PATIENCE)
            after = "never" if ending.seconds is None else f"{ending.seconds:.0f}"
            victims = ", ".join(map(str, plan.victims))
            print(
                f"| {kind} | {plan.layout} | {victims} of {plan.ranks} | {after} | {_says(ending.said)} |", flush=True
            )


def _says(said: str) -> str:
    errors = re.findall(r"^\[rank(\d+)\]: (\w+(?:Error|Exception).*)$", said, re.MULTILINE)
    root = re.search(r"Root Cause.*?rank\s*: (\d+)", said, re.DOTALL)
    words = [f"rank {rank}: {re.sub('[[]/.*?[.]cc:[0-9]+[]] ', '', error)}" for rank, error in errors[:1]]
    return "; ".join([*words, *([f"root cause: rank {root[1]}"] if root else [])]).replace("|", "\\|") or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=25, help="of each kind")
    parser.add_argument("--kinds", default=",".join(hangs.KINDS))
    parser.add_argument("--replay", metavar="KIND:NUMBER")
    parser.add_argument("--plain", action="store_true", help="scripts that do not import paceline")
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if options.torchrun:
        torchrun(kinds)
    elif options.replay:
        kind, _, number = options.replay.partition(":")
        print(hangs.draw(kind, int(number), options.plain))
        result = one(kind, int(number), options.plain)
        print(result.text, f"\n{result.seconds} s, limit {result.limit} s; {result.problem or 'right'}")
        sys.exit(not result.is_right)
    else:
        results = options.results.with_stem(options.results.stem + "-plain") if options.plain else options.results
        if options.fresh:
            results.unlink(missing_ok=True)
        sys.exit(not table(campaign(kinds, options.runs, options.plain, results)))


if __name__ == "__main__":
    main()
