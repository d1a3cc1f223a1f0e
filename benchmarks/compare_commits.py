"""Compare the key figures of this checkout with those of another commit, measured alternately, as ratios.

    python benchmarks/compare_commits.py [BASE]                    BASE defaults to HEAD~1
    python benchmarks/compare_commits.py main --quick              3 rounds instead of 9: 90 s of CPU time
    python benchmarks/compare_commits.py --record                  append both to benchmarks/history.jsonl
    python benchmarks/compare_commits.py --only import,loop

Both sides run `key_figures.py` of this checkout in the same environment, each with its own source; BASE is checked out
into a temporary git worktree. Values are medians over the rounds. The ratio is the median of the ratios within each
round, so that varying load affects both sides equally; its range over the rounds shows the remaining noise. On a shared
machine, look at the ratio of the best rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from key_figures import GROUPS, UNITS

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("key_figures.py")
HISTORY = Path(__file__).with_name("history.jsonl")
ROUNDS, QUICK_ROUNDS = 9, 3


@dataclass
class Side:
    """One of the two commits, and its figures by round."""

    name: str
    commit: str
    source: Path
    values: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, group: str) -> None:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), group],
            env={**os.environ, "PYTHONPATH": str(self.source), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{self.name} ({self.commit[:9]}): measuring {group} failed with status {done.returncode}.")
        for figure, value in json.loads(done.stdout.splitlines()[-1]).items():
            self.values.setdefault(figure, []).append(value)


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # git has printed the reason
        sys.exit(f"git {' '.join(args)} failed with status {done.returncode}.")
    return done.stdout.strip()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-base-") as folder:
        path = Path(folder) / "base"
        git("worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def compare(base: Side, head: Side, groups: Sequence[str], rounds: int) -> None:
    sides = [base, head]
    for side in sides:  # otherwise the first round would compile a fresh checkout
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(side.source)], check=True)
    for group in groups:
        for _ in range(rounds):
            for side in sides:
                side.measure(group)
            sides.reverse()  # alternate which one is first


def print_table(base: Side, head: Side, rounds: int) -> None:
    print(f"{machine()}; {rounds} rounds, interleaved\n")
    print(f"| figure | {base.name} | {head.name} | unit | ratio | of the best | by round |\n{'|---' * 7}|")
    for figure, before in base.values.items():
        after = head.values[figure]
        cells = [figure, *(f"{statistics.median(values):.4g}" for values in (before, after)), UNITS[figure]]
        if min(before) > 0 and min(after) > 0:
            ratios = [new / old for old, new in zip(before, after, strict=True)]
            best = f"{min(after) / min(before):.3f}"
            cells += [f"{statistics.median(ratios):.3f}", best, f"{min(ratios):.3f} to {max(ratios):.3f}"]
        else:  # an overhead may be negative; its ratio is meaningless
            steps = [new - old for old, new in zip(before, after, strict=True)]
            cells += ["–", "–", f"difference {min(steps):+.4g} to {max(steps):+.4g}"]
        print(f"| {' | '.join(cells)} |")


def machine() -> str:
    """What the figures depend on, without the host name. A load above 1 or 2 means that other programs were running."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    versions = f"{platform.system()}, Python {platform.python_version()}, torch {version('torch')}"
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}, {versions}, load {os.getloadavg()[0]:.1f}"


def record(sides: Sequence[Side]) -> None:
    date, where = datetime.now(UTC).date().isoformat(), machine()
    with HISTORY.open("a") as file:
        for side in sides:
            for figure, values in side.values.items():
                value = float(f"{statistics.median(values):.4g}")
                row = {"commit": side.commit, "date": date, "machine": where, "figure": figure, "value": value}
                file.write(json.dumps({**row, "unit": UNITS[figure]}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", default="HEAD~1", help="a commit, branch or tag (default: HEAD~1)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--record", action="store_true", help="append the figures to benchmarks/history.jsonl")
    options = parser.parse_args()
    groups = options.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"Unknown figures: {', '.join(sorted(unknown))}. Choose from: {', '.join(GROUPS)}.")
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    dirty = git("status", "--porcelain", "--", "src")
    if options.record and dirty:
        parser.error("--record needs a commit to name, and src has uncommitted changes. Commit them first.")
    with worktree(options.base) as path:
        base = Side(options.base, git("rev-parse", f"{options.base}^{{commit}}"), path / "src")
        head = Side("working tree" if dirty else "HEAD", git("rev-parse", "HEAD"), ROOT / "src")
        compare(base, head, groups, rounds)
    print_table(base, head, rounds)
    if options.record:
        record([base, head])


if __name__ == "__main__":
    main()
