"""Compare the key figures of this checkout with those of another commit, measured alternately, as ratios.

    python benchmarks/compare_commits.py [BASE]                    BASE defaults to HEAD~1
    python benchmarks/compare_commits.py main --check              exit with status 1 if a figure got worse
    python benchmarks/compare_commits.py main --quick              3 rounds instead of 9: 3 minutes of CPU time
    python benchmarks/compare_commits.py --record                  append both to benchmarks/history.jsonl
    python benchmarks/compare_commits.py --only import,loop

Both sides run `key_figures.py` of this checkout in the same environment, each with its own source; BASE is checked out
into a temporary git worktree. Values are medians over the rounds. The ratio is the median of the ratios within each
round, so that varying load affects both sides equally; its range over the rounds shows the remaining noise. The last
column says which figures moved by more than that (`verdict.py`). Three rounds are too few for times, but enough for
counts. On a shared machine, look at the ratio of the best rounds.
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

from key_figures import GROUPS, SMALLEST, UNITS
from verdict import NEEDED, UNDECIDED, WORSE, verdict

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

    def measure(self, group: str) -> bool:
        """False if this machine has none of the figures."""
        done = subprocess.run(
            [sys.executable, str(PROGRAM), group],
            env={**os.environ, "PYTHONPATH": str(self.source), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{self.name} ({self.commit[:9]}): measuring {group} failed with status {done.returncode}.")
        figures = json.loads(done.stdout.splitlines()[-1])
        for figure, value in figures.items():
            self.values.setdefault(figure, []).append(value)
        return bool(figures)


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
            if not all(side.measure(group) for side in sides):
                break
            sides.reverse()  # alternate which one is first


def verdicts(base: Side, head: Side) -> dict[str, str]:
    return {
        figure: verdict(before, head.values[figure], UNITS[figure], SMALLEST.get(figure))
        for figure, before in base.values.items()
    }


def print_table(base: Side, head: Side, rounds: int) -> None:
    print(f"{machine()}; {rounds} rounds, interleaved\n")
    print(f"| figure | {base.name} | {head.name} | unit | ratio | of the best | by round | moved |\n{'|---' * 8}|")
    for figure, moved in verdicts(base, head).items():
        before, after = base.values[figure], head.values[figure]
        cells = [figure, *(f"{statistics.median(values):.4g}" for values in (before, after)), UNITS[figure]]
        if figure in SMALLEST:  # an overhead may be negative; its ratio is meaningless
            steps = [new - old for old, new in zip(before, after, strict=True)]
            cells += ["–", "–", f"difference {min(steps):+.4g} to {max(steps):+.4g}"]
        else:
            ratios = [new / old for old, new in zip(before, after, strict=True)]
            best = f"{min(after) / min(before):.3f}"
            cells += [f"{statistics.median(ratios):.3f}", best, f"{min(ratios):.3f} to {max(ratios):.3f}"]
        print(f"| {' | '.join(cells)} | {moved} |")
    if UNDECIDED in verdicts(base, head).values():
        print(f"\n{UNDECIDED}: {rounds} rounds are too few to tell a change from noise; {NEEDED} are enough.")


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
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure got worse")
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
    if options.check and (worse := [figure for figure, moved in verdicts(base, head).items() if moved in WORSE]):
        sys.exit(f"Worse than {base.name}: {'; '.join(worse)}.")


if __name__ == "__main__":
    main()
