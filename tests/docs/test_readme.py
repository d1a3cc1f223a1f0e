"""What the README promises about itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ROWS = [line for line in README.splitlines() if line.startswith("| ") and "tests/" in line]


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_every_row_of_the_comparison_is_backed_by_tests() -> None:
    """The table has no row without a file of tests, and the files have tests."""
    table = README.partition("| | paceline |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(ROWS) == len(table) >= 10
    for row in ROWS:
        files = re.findall(r"\]\((tests/[^)]+\.py)\)", row)
        assert files, row
        for file in files:
            names = [
                node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
            ]
            assert [name for name in names if name.startswith("test_")], file


def test_its_pictures_are_made_by_programs_of_the_repository() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    programs = [(ROOT / path).read_text() for path in ("tools/terminal_picture.py", "benchmarks/page_screenshots.py")]
    assert pictures and all(any(Path(each).stem in program for program in programs) for each in pictures)
