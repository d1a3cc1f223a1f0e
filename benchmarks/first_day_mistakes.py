"""What people read after the mistakes of a first day. Exit status 1 if an output lacks what tests/mistakes expects.

    python benchmarks/first_day_mistakes.py FOLDER [--only PATTERN]

Writes FOLDER/NAME.txt for every mistake: its files, the command, and the output. Names of failures are listed with what
is missing. Commands run in forks of this process, in which torch is imported.
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

import nodes
import paceline.train.trainer  # noqa: F401
from mistakes.all_mistakes import ALL
from mistakes.mistake import Mistake, run_forked


def report(mistake: Mistake, status: int | None, said: str, folder: Path) -> str:
    files = "".join(f"=== {path.name} ===\n{path.read_text()}\n" for path in map(folder.joinpath, mistake.files))
    env = "".join(f"{name}={value} " for name, value in mistake.env.items())
    return f"{files}=== $ {env}{mistake.start} ===\n{said}=== exit status {status} ===\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="PATTERN", help="only mistakes whose name matches")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [mistake for mistake in ALL if re.search(options.only, mistake.name)]
    wrong = 0
    for mistake in chosen:
        with tempfile.TemporaryDirectory() as name, nodes.launchers(Path(name)) as launch:
            status, said = run_forked(mistake, Path(name), launch)
            (options.folder / f"{mistake}.txt").write_text(report(mistake, status, said, Path(name)))
        problems = mistake.judge(status, said)
        wrong += bool(problems)
        print(f"{mistake.name:<40} {'; '.join(problems) or 'ok'}", flush=True)
    print(f"\n{len(chosen) - wrong} of {len(chosen)} name the cause and the line")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
