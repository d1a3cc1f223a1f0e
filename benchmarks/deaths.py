"""The table of "Rank failures" in docs/reliability.md. Exit status 1 if paceline misidentifies one of them.

    python benchmarks/deaths.py [--only WORD]

The same script fails in eighteen ways (tests/faults/deaths.py) under `paceline launch` and under torchrun; the table
shows the report of each. It needs permission to create a memory cgroup, for the kernel's OOM killer.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import cgroups, deaths

_LONGEST = 160
_VERDICT = re.compile(r"^rank (\d+) failed first.*: ([\w-]+)\n(.*)$", re.MULTILINE)
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):(.*?)={20}", re.DOTALL)


def paceline_says(said: str) -> str:
    found = _VERDICT.search(said)
    return f"**{found.group(2)}**: {found.group(3)}" if found else "nothing"


def torchrun_says(said: str) -> str:
    found = _ROOT_CAUSE.search(said)
    if not found:
        return "nothing" if "Root Cause" not in said else "a root cause without its facts"
    facts = dict(re.findall(r"^\s*(rank|exitcode|error_file|traceback)\s*: (.*)$", found.group(1), re.MULTILINE))
    rank = facts["rank"].partition(" ")[0]
    says = f"rank {rank}, exitcode {facts['exitcode']}, error_file {facts['error_file']}, {facts['traceback']}"
    return re.sub(r" \(pid: \d+\) *| received by PID \d+", "", says)


def cell(text: str) -> str:
    plain = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "\\<")
    return plain if len(plain) <= _LONGEST else plain[:_LONGEST] + "…"


def both(death: deaths.Death, root: Path, cgroup: str) -> str:
    """Print a row of the table; return what paceline got wrong."""
    outcomes = []
    for launcher in (deaths.paceline, deaths.torchrun):
        folder = root / f"{death}-{launcher.__name__}"
        folder.mkdir()
        outcomes.append(deaths.run(death, launcher(death.ranks), folder, cgroup))
    ours, theirs = outcomes
    left = " / ".join("; ".join(outcome.left) or "nothing" for outcome in outcomes)
    says = f"{paceline_says(ours.said)} (status {ours.status})"
    print(f"| {death} | {cell(says)} | {cell(f'{torchrun_says(theirs.said)} (status {theirs.status})')} | {left} |")
    sys.stdout.flush()
    return deaths.problem(death, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only failures whose name contains this")
    options = parser.parse_args()
    chosen = [death for death in deaths.ALL if options.only in str(death)]
    print("| failure | report of paceline | report of torchrun | left behind: paceline / torchrun |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, cgroups.small() as cgroup:
        problems = {str(death): both(death, Path(name), cgroup) for death in chosen}
    wrong = {death: problem for death, problem in problems.items() if problem}
    print(f"\n{len(problems) - len(wrong)} of {len(problems)} identified correctly, with nothing left behind")
    for death, problem in wrong.items():
        print(f"{death}: {problem}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
