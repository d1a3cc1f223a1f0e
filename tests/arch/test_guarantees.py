"""Every guarantee in the table of CONTRIBUTING.md has a test that `make test` runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("### Guarantees\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (.+?) \| (`.+`) \|$", SECTION, re.M)[1:]  # without the heading


def is_nightly(expression: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "nightly" for node in ast.walk(expression))


def usual_tests(source: str) -> set[str]:
    """Names of the tests of a module that are not left to `make test-all`."""
    body = ast.parse(source).body
    marks = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    if any(is_nightly(mark) for mark in marks):
        return set()
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {each.name for each in functions if not any(map(is_nightly, marks_of(each)))}


def marks_of(function: ast.FunctionDef) -> list[ast.expr]:
    """Its decorators. Of the cases of `parametrize` some may be nightly."""
    return [each for each in function.decorator_list if "parametrize" not in ast.unparse(each)]


def named_tests() -> list[tuple[str, str]]:
    return [(file, name) for _, cell in ROWS for file, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)]


def test_every_row_names_a_test_that_make_test_runs() -> None:
    assert len(ROWS) > 50
    assert [what for what, cell in ROWS if "::test_" not in cell] == []
    known = {file: usual_tests((ROOT / file).read_text()) for file, _ in named_tests() if (ROOT / file).is_file()}
    assert [f"{file}::{name}" for file, name in named_tests() if name not in known.get(file, set())] == []


def test_every_ring_keeps_guarantees() -> None:
    rings = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} | {"unit"}
    assert rings - {file.split("/")[1] for file, _ in named_tests()} == {"gpu"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_a(): ...", {"test_a"}),
        ("@pytest.mark.nightly\n@pytest.mark.timeout(3)\ndef test_a(): ...\ndef test_b(): ...", {"test_b"}),
        ("pytestmark = [pytest.mark.timeout(3), pytest.mark.nightly]\ndef test_a(): ...", set()),
        (
            "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.nightly)])\ndef test_a(x): ...",
            {"test_a"},
        ),
    ],
)
def test_a_test_that_is_left_to_the_night_is_told(source: str, expected: set[str]) -> None:
    assert usual_tests(source) == expected
