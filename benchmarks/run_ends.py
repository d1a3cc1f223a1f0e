"""Writes docs/run-ends.md: seven ways to start a training × twelve ways to end it, and what each reader of the run
says. Exit status 1 if they do not agree, or are wrong.

    python benchmarks/run_ends.py [--only WORD]

What happens stands in tests/faults/run_ends.py; `make test-all` checks the same.
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
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import nodes  # noqa: E402
import warm  # noqa: E402
from faults import run_ends  # noqa: E402

PAGE = ROOT / "docs" / "run-ends.md"
HEAD = """# How runs end

Seven ways to start a training, twelve ways to end it, and what is said about that: the line of the terminal that tells
why; `paceline ls`, whose words are also those of `paceline show` and of the page; the fields of the record in
`paceline show --json`; and a line of `paceline explain RUN`. `python benchmarks/run_ends.py` wrote this page;
`tests/faults/test_run_ends.py` checks that all of them agree.

The last rank is the one that fails, of two; plain `python` has one. Without a launcher, nobody is left to say that a
rank was killed or called `os._exit`: readers then say just that. Custom loops have no signal handlers, so SIGTERM kills
their process.
"""
TITLES = "| end | terminal | `ls`, `show`, page | `--json` | `explain` | agree |\n|---|---|---|---|---|---|"
WHY = ("Error", "error", "interrupted", "failed first", "was killed", "exited with", "Signal", "raised", "SIG")


def last_line(said: str) -> str:
    """The line of a terminal that says most about the end: below `failed first`, or the last one that names a cause."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if " failed first" in line:
            return lines[number + 1]
    return next((line for line in reversed(lines) if any(word in line for word in WHY)), "–")


def cell(text: str) -> str:
    plain = " ".join(text.split()).replace("|", "\\|").replace("<", "\\<").replace(str(ROOT) + "/", "")
    return plain if len(plain) <= 110 else plain[:109] + "…"


def record(seen: run_ends.Seen) -> str:
    end = seen.json.get("end") or {}
    named = {
        name: end[name] for name in ("cause", "signal", "exception", "rank", "step") if end.get(name) not in ("", None)
    }
    if end.get("file"):
        named["line"] = f"{Path(end['file']).name}:{end['line']}"
    return ", ".join(f"{name} {value}" for name, value in named.items()) or "–"


def row(start: str, way: str) -> tuple[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder, nodes.launchers(Path(folder)) as launch:
        seen = run_ends.see(start, way, Path(folder), launch)
    wrong = run_ends.disagreements(start, way, seen)
    told = seen.explain.splitlines()
    explained = next((line for line in told[1:] if line.strip()), told[0] if told else "–")
    cells = [way, last_line(seen.terminal) if way != "success" else "–", seen.ls, record(seen), explained]
    return f"| {' | '.join(map(cell, cells))} | {'; '.join(wrong) or '✓'} |", wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="starts and ends with this word, printed only")
    only = parser.parse_args().only
    warm.import_what_ranks_need()
    page, bad = HEAD, 0
    for start in run_ends.STARTS:
        chosen = [way for way in run_ends.WAYS if only in f"{start}: {way}"]
        if not chosen:
            continue
        page += f"\n## {start}\n\n{TITLES}\n"
        for way in chosen:
            line, wrong = row(start, way)
            bad += bool(wrong)
            page += re.sub(r"\b(PID|Process) \d+", r"\1 N", line) + "\n"
            print(start, line, flush=True)
        if not only:
            PAGE.write_text(page)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
