"""Measures of how much there is to carry. Each is at today's value: whoever lowers one lowers it here as well, in the
same commit. None rises, except `LINES` by what was agreed for a feature, and `MODULES_OF_A_RANK` by the module of a
feature that every rank builds, up to 224."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import paceline

SOURCE = Path(paceline.__file__).parent
TESTS = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))

LINES = 59_530  # of all files, with blank lines and docstrings
ENGINE_FIELDS = 16
ENGINE_IMPORTS = 14
ASSIGNED_FROM_OUTSIDE = 0  # attributes of the step and of the update of the optimizer
MODULES_OF_A_RANK = 200
PACKAGES = 15
LAYERS = 7  # of packages; modules are below them, and `paceline.testing` is above
THREADS_OF_A_RANK = 1  # under paceline launch
REPEATED_HELPERS = 181  # names of functions that two files of tests define


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_all_lines() -> None:
    """A ceiling far above what there is holds nothing."""
    lines = sum(path.read_text().count("\n") for path in FILES)
    assert LINES - 150 <= lines <= LINES


def test_packages_and_their_layers() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    contract = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [set(re.findall(r"paceline\.(\w+)", row)) & packages for row in contract["layers"]]
    assert set.union(*layers) == packages
    assert (len(packages), len([layer for layer in layers if layer])) == (PACKAGES, LAYERS)


def stored(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Attributes that a statement assigns: the expression in front, and the name."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for part in (part for target in targets for part in ast.walk(target)):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield ast.unparse(part.value), part.attr


def test_fields_of_the_engine() -> None:
    engine = next(node for node in tree(SOURCE / "train/engine.py").body if getattr(node, "name", "") == "Engine")
    fields = {ast.unparse(node.target) for node in engine.body if isinstance(node, ast.AnnAssign)}
    fields |= {name for node in ast.walk(engine) for owner, name in stored(node) if owner == "self"}
    assert len(fields) == ENGINE_FIELDS


def test_modules_that_the_engine_imports() -> None:
    imports = [node for node in tree(SOURCE / "train/engine.py").body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) == ENGINE_IMPORTS


def test_attributes_of_the_step_that_others_assign() -> None:
    found = {
        (owner.rpartition(".")[2].lstrip("_"), name)
        for path in FILES
        if path.is_relative_to(SOURCE / "train")
        for node in ast.walk(tree(path))
        for owner, name in stored(node)
    }
    assert len([pair for pair in found if pair[0] in ("stepper", "updater")]) == ASSIGNED_FROM_OUTSIDE


def test_modules_that_a_rank_imports() -> None:
    code = "import sys, paceline.train.trainer; print(sum(name.startswith('paceline') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == MODULES_OF_A_RANK


def test_threads_of_a_rank(in_folder: Path) -> None:
    assert paceline.launch(threads_in_training, ranks=2) == THREADS_OF_A_RANK


def threads_in_training() -> int:
    numbers: list[int] = []

    def count(*_: object) -> None:
        numbers.append(sum(thread.name.startswith("paceline") for thread in threading.enumerate()))

    trainer = paceline.Trainer(
        torch.nn.Linear(4, 1), criterion=torch.nn.MSELoss(), batch=8, run=False, callbacks=[count], quiet=True
    )
    trainer.train(TensorDataset(torch.ones(32, 4), torch.ones(32, 1)), epochs=1)
    return max(numbers)


def test_names_of_helpers_that_two_files_of_tests_define() -> None:
    files: dict[str, set[Path]] = defaultdict(set)
    for path in TESTS.rglob("*.py"):
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith(("test_", "pytest_")):
                files[node.name].add(path)
    repeated = [name for name, paths in files.items() if len(paths) > 1]
    assert len(repeated) <= REPEATED_HELPERS, f"{len(repeated)} names, {REPEATED_HELPERS} before"
