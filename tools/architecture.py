"""The map of packages in docs/architecture.md, from the import contract in pyproject.toml and the imports in the code.

python tools/architecture.py    # rewrites the map
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
PAGE = ROOT / "docs" / "architecture.md"
MAP = re.compile(r"(<!-- map: .*? -->\n)(.*?)(<!-- end of map -->)", re.S)

PACKAGES = {
    "testing": "public names of `tools/testing`",
    "tools": "what people run: `cli`, `watch`, `doctor`, `bench`, `search`, `testing`; nothing below imports it",
    "train": "the Trainer and its loop, `checks` of a training, `checkpointing`; never starts processes",
    "precision": "number formats, loss scaling",
    "parallel": "one function per axis and pass; `parallelize` applies them in order; `sync`: less communication",
    "optim": "optimizers, schedules, clipping, EMA",
    "checkpoint": "format, writing and reading of checkpoints",
    "monitor": "loggers, progress bar, profiler, stragglers",
    "launcher": "starting and supervising ranks, on one node or many",
    "models": "built-in models, losses, what a model declares",
    "data": "sample order, loaders, datasets",
    "runtime": "this process in its world: rank, process group, collectives, random state",
    "diagnose": "why ranks ended or hang; the pages of error codes",
    "plan": "layout, batch, schedule and memory, each value with its reason",
    "run": "the run folder: names, formats, lock, ledger",
    "config": "recipes and launch settings as frozen data",
    "user_code": "functions and classes that recipes name, imported from the user's code",
    "registry": "components by name",
    "log": "what is shown",
    "text": "formatting",
    "errors": "the exception classes",
}


def layers() -> list[list[str]]:
    """Packages from the top down, as import-linter enforces them; those of a layer do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = contracts[0]["layers"]
    return [[name.strip().removeprefix("paceline.") for name in re.split("[|:]", row)] for row in rows]


def imports() -> dict[str, set[str]]:
    """The packages that each package imports, anywhere in its files."""
    found = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if names == ["paceline"]:
                names = [f"paceline.{each.name}" for each in node.names]
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            found[package] |= {name.split(".")[1] for name in names if name.startswith("paceline.")}
    return {package: {name for name in names if name in PACKAGES} - {package} for package, names in found.items()}


def architecture_map() -> str:
    """Markdown: the layers, and what each package does and imports."""
    order, imported = layers(), imports()
    width = max(len(" · ".join(layer)) for layer in order)
    rows = [f"{number:>2}  {' · '.join(layer):<{width}}" for number, layer in enumerate(order)]
    names = [name for layer in order for name in layer]
    lines = ["", "```text", *(row.rstrip() for row in rows), "```", "", "| package | | imports |", "|---|---|---|"]
    for name in names:
        below = ", ".join(f"`{each}`" for each in names if each in imported.get(name, set()))
        lines.append(f"| `{name}` | {PACKAGES[name]} | {below or '–'} |")
    return "\n".join(lines) + "\n\n"


def main() -> None:
    PAGE.write_text(MAP.sub(lambda found: found[1] + architecture_map() + found[3], PAGE.read_text()))


if __name__ == "__main__":
    main()
