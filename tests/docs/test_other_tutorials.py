"""Every part of the guides has a row in docs/reference/other-tutorials.md, and every row names what exists."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "other-tutorials.md"
GUIDES = ROOT.parent / "shared" / "guides"
# The line of each list item, table row and code block of the guides, outside of the sections left out below. The guides
# themselves are not part of the repository.
PARTS: dict[str, list[int]] = json.loads(Path(__file__).with_name("guide_parts.json").read_text())
ROWS = [
    (guide, first, last, shown)
    for shown, guide, first, last in re.findall(
        r"^\| .+? \| .+? \| (.+?) \| (\d{3}):(\d+)–(\d+) \|$", PAGE.read_text(), flags=re.MULTILINE
    )
]

# Contents, links, and what the table in symptoms.md covers.
LEFT_OUT = re.compile(
    r"#+ .*(?:Table of Contents|See Also|Related|Resources|Troubleshooting|Pitfalls|Debug(?:ging Tips| Mode))", re.I
)
PART = re.compile(r"[-*] |\d+\. |\| (?!Configuration|Error)")


def parts_of(guide: Path) -> list[int]:
    found: list[int] = []
    left_out, in_code = 0, False  # the level of the heading whose section is left out, or 0
    for number, line in enumerate(guide.read_text().splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
            found += [number] * (in_code and not left_out)
        elif not in_code and (heading := re.match(r"(#+) ", line)):
            if len(heading[1]) <= left_out:
                left_out = 0
            if not left_out and LEFT_OUT.match(line):
                left_out = len(heading[1])
        elif not in_code and not left_out and PART.match(line):
            found.append(number)
    return found


@pytest.mark.skipif(not GUIDES.is_dir(), reason="the guides are not part of the repository")
def test_the_list_of_parts_is_that_of_the_guides() -> None:
    assert {guide.name[:3]: parts_of(guide) for guide in sorted(GUIDES.glob("*.txt"))} == PARTS


def uncovered(rows: list[tuple[str, ...]]) -> list[str]:
    ranges = [(guide, range(int(first), int(last) + 1)) for guide, first, last, *_ in rows]
    return [
        f"{guide}:{line}"
        for guide, lines in PARTS.items()
        for line in lines
        if not any(guide == other and line in covered for other, covered in ranges)
    ]


def test_every_part_has_a_row() -> None:
    assert sum(map(len, PARTS.values())) > 200
    assert uncovered(ROWS) == []
    assert all(uncovered([row for row in ROWS if row is not left]) for left in ROWS), "a row covers no part by itself"


@cache
def functions_in(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def exists(target: str) -> bool:
    file, _, name = target.partition("::")
    return (ROOT / file).is_file() and (not name or name in functions_in(file))


def test_every_row_names_what_exists() -> None:
    targets = [target for *_, shown in ROWS for target in re.findall(r"`([^`]+)`", shown)]
    assert len(targets) >= len(ROWS) > 60
    assert [target for target in targets if not exists(target)] == []
    assert not exists("tests/docs/test_other_tutorials.py::test_no_such_thing") and not exists("examples/nothing.py")


def test_every_row_has_a_test_or_an_example_that_a_test_runs() -> None:
    """A page alone shows nothing."""
    missing = [
        f"{guide}:{first}" for guide, first, *_, shown in ROWS if not re.search(r"`(?:tests|examples)/[^`]+\.py", shown)
    ]
    assert missing == []
