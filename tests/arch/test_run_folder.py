"""`run/` owns the run folder: no other module spells the name of a file in it, and `run/` reads no environment.

The names come from `RunFolder` itself, so a file that is added there is covered here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.run.folder import RankFiles, RunFolder

SOURCE = Path(paceline.__file__).parent

# Words that are also something else. A dictionary key, an index and a `Literal[...]` never count.
NOT_A_FILE = {
    ("tools/cli/runs.py", "report.html"): "the default of -o, in the working directory",
    ("config/recipe.py", "report.html"): "the description of a recipe key; config is below run",
    ("tools/doctor/bundle.py", "environment.json"): "a member of the bundle, with environment variables",
    ("config/recipe.py", "metrics.jsonl"): "the description of a recipe key; config is below run",
    ("config/components.py", "tensorboard"): "the name of a logger",
    ("monitor/loggers.py", "tensorboard"): "the name of a logger and of its package",
    ("plan/network_model.py", "profile"): "the name of a setting",
    ("train/custom_loop_methods.py", "profile"): "the name of a setting",
    ("train/evaluate.py", "best"): "a key of a state dict",
}


def file_names() -> set[str]:
    """The name of every file and folder of a run folder, with `#` for a rank."""
    folder = RunFolder(Path("run"))
    values = [getattr(folder, name) for name in vars(RunFolder) if not name.startswith("_")]
    names = {part for value in values if isinstance(value, Path) for part in value.relative_to("run").parts}
    for value in values:
        if isinstance(value, RankFiles):
            names |= {*value.folder.relative_to("run").parts, re.sub(r"\{.*\}", "#", value.name)}
    return names


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every string of a module but docstrings and keys, with `#` for a value inside an f-string."""
    skipped: set[int] = set()
    for node in ast.walk(tree):  # parents come before their children
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.Dict):
            skipped |= {id(key) for key in node.keys}
        elif isinstance(node, ast.Subscript):
            skipped |= {id(inner) for inner in ast.walk(node.slice)}
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = [str(part.value) if isinstance(part, ast.Constant) else "#" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def named(text: str, names: set[str]) -> set[str]:
    """The files that a string names: a name with an extension anywhere in it, or any name as a part of a path."""
    parts = {re.sub(r"\*|\{[^}]*\}|\d+", "#", part) for part in text.split("/")}
    prefixes = {name: name.partition("#")[0] for name in names if "#" in name}
    found = {name for name in names if name in parts}
    found |= {name for name, prefix in prefixes.items() if prefix in parts and prefix != "rank-"}
    found |= {name for name in names if "." in name and re.search(rf"(?<![\w.#-]){re.escape(name)}(?!\w)", text)}
    return found


def mentions(source: Path) -> Iterator[tuple[str, int, str]]:
    """Module, line and name of each file of a run folder that is named outside of `run/`."""
    names = file_names()
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source).as_posix()
        if not module.startswith("run/"):
            for line, text in literals(ast.parse(path.read_text())):
                yield from ((module, line, name) for name in sorted(named(text, names)))


def test_no_other_module_names_a_file_of_the_run_folder() -> None:
    found = list(mentions(SOURCE))
    assert [mention for mention in found if (mention[0], mention[2]) not in NOT_A_FILE] == []
    unused = set(NOT_A_FILE) - {(module, name) for module, _, name in found}
    assert unused == set()


def test_the_names_are_those_of_the_run_folder() -> None:
    expected = {"config.yaml", "metrics.jsonl", ".lock", "checkpoints", "latest", "logs", "rank-#.log", "progress-#"}
    assert expected <= file_names()


@pytest.mark.parametrize(
    "line",
    [
        'path = run / "metrics.jsonl"',
        'path = run.joinpath("logs", "x")',
        'path = run / f"logs/rank-{rank}.log"',
        'path = run / f"progress-{rank}"',
        'path = next(run.glob("failure-*.json"))',
        'PREFIX = "suspects-"',
        'found = run.glob("*/checkpoints")',
        'text = "see config.yaml in the run folder"',
        'is_it = path.name == "latest"',
    ],
)
def test_a_module_that_names_one_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "module.py").write_text(f'"""Writes metrics.jsonl."""\n\n{line}\n')
    assert {(module, number) for module, number, _ in mentions(tmp_path)} == {("module.py", 3)}


@pytest.mark.parametrize(
    "line", ['state = {"best": best}', 'best = state["best"]', 'text = "the latest logs"', 'x = f"random/rank-{n}/y"']
)
def test_words_that_name_no_file_are_not(tmp_path: Path, line: str) -> None:
    (tmp_path / "module.py").write_text(f"{line}\n")
    assert list(mentions(tmp_path)) == []


def test_run_reads_no_environment() -> None:
    readers = {
        path.name
        for path in (SOURCE / "run").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "getenv"))
    }
    assert readers == set()
