"""Continue and read run folders with a link, a pipe, a device, a socket or a folder under every name.

    python benchmarks/hostile_folders.py

Exits with status 1 if a file outside of a run folder changes, or something blocks or fails without a code.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import hostile_folders


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-folders-") as name:
        scratch = Path(name)
        template = hostile_folders.make_run(scratch / "template")
        cases = list(hostile_folders.cases(template))
        problems = []
        for case in cases:
            problem = hostile_folders.attempt(case, template, scratch)
            if problem is not None:
                problems.append(problem)
                print(problem, flush=True)
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
