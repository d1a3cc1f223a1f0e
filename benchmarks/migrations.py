"""Scripts of other frameworks, and what they become: number of lines, and what both reach on two CPU ranks.

    python benchmarks/migrations.py [--peers FOLDER] [--write-docs]

`make migrations` installs the other frameworks into a folder of its own first. `--write-docs` puts the table and the
differences into docs/guides/.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER, GUIDES = ROOT / "examples" / "migrate", ROOT / "docs" / "guides"
PAGES = [GUIDES / "migrate.md", *sorted(GUIDES.glob("from-*.md"))]
NAMES = {
    "ddp": "plain DDP",
    "spawn": "`mp.spawn`",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "hf_trainer": "HF Trainer",
}
ALONE = {"before_spawn.py", "after_spawn.py", "before_lightning.py"}  # start their processes themselves


def code(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()]


def difference(name: str) -> str:
    """Both scripts as a unified diff, without its header."""
    before, after = (code(FOLDER / f"{when}_{name}.py") for when in ("before", "after"))
    return "\n".join(list(difflib.unified_diff(before, after, lineterm="", n=99))[3:])


def counts(name: str) -> tuple[int, int, int, int]:
    """Lines of code before and after, removed and added."""
    lines = difference(name).splitlines()
    removed, added = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    return len(code(FOLDER / f"before_{name}.py")), len(code(FOLDER / f"after_{name}.py")), removed, added


def result(script: str, peers: Path | None) -> str:
    """What the script printed last, on two ranks."""
    command = [sys.executable]
    if script not in ALONE:
        command += ["-m", "paceline", "launch", "--cpu", "-n", "2"]
    paths = [os.environ.get("PYTHONPATH", ""), str(peers or "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, str(FOLDER / script)], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
    found = re.findall(r"^(?:epoch \d+: )?((?:accuracy|loss) [\d.]+)", done.stdout, re.M)
    if done.returncode or not found:
        raise SystemExit(f"{script} failed:\n{done.stdout}{done.stderr}")
    return str(found[-1])


def row(name: str, cells: list[str]) -> str:
    before, after, removed, added = counts(name)
    return f"| {NAMES[name]} | {before} | {after} | −{removed} +{added} | {' | '.join(cells)} |"


def insert(page: str, mark: str, text: str) -> str:
    return re.sub(rf"(?s)(<!-- {mark} -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{text}\n{found[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=Path, help="folder with the other frameworks (pip install --target)")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    head = ["| from | lines before | after | changed | before | after |", "|---|---|---|---|---|---|"]
    rows = [row(name, [result(f"{when}_{name}.py", options.peers) for when in ("before", "after")]) for name in NAMES]
    table = "\n".join([*head, *rows])
    print(table)
    if options.write_docs:
        for path in PAGES:
            page = insert(path.read_text(), "migrations.py: table", table)
            for name in NAMES:
                page = insert(page, f"migrations.py: {name}", f"```diff\n{difference(name)}\n```")
            path.write_text(page)


if __name__ == "__main__":
    main()
