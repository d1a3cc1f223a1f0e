"""Every row of the troubleshooting sections of the guides is detected by something, and a test shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from paceline.diagnose import catalog

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "symptoms.md"
GUIDES = ROOT.parent / "shared" / "guides"
ROWS = [
    (guide, line, symptom, detector, reference)
    for symptom, detector, reference, guide, line in re.findall(
        r"^\| (.+?) \| (.+?) \| `(.+?)` \| (\d{3}):(\d+) \|$", PAGE.read_text(), flags=re.MULTILINE
    )
]

# What a guide's section about problems consists of: headings of symptoms, bullets, rows of tables, variables to set.
SECTION = re.compile(r"^#+ .*(?:Troubleshooting|Pitfalls|Debug(?:ging Tips| Mode))", re.IGNORECASE)
GROUPS = ("Common Issues", "Common Error Messages")
SYMPTOM = re.compile(
    r"^\*\*(?!Solutions?:|Symptom:)(.+?):?\*\*|^\| `(.+?)` \||^- (.+)|^ {3}- (.+)|^export (\w+)=|^(iperf3 .*)"
)


def rows_of(guide: Path) -> list[tuple[int, str]]:
    """Line and text of each row."""
    found: list[tuple[int, str]] = []
    level, in_code = 0, False
    for number, line in enumerate(guide.read_text().splitlines(), 1):
        in_code ^= line.startswith("```")
        if not in_code and (heading := re.match(r"^(#+) (.+)", line)):
            if SECTION.match(line):
                level = level or len(heading[1])
            elif level and len(heading[1]) <= level:
                level = 0
            elif level and heading[2] not in GROUPS:
                found.append((number, heading[2]))
        elif level and (symptom := SYMPTOM.match(line)):
            found.append((number, next(group for group in symptom.groups() if group)))
    return found


@pytest.mark.skipif(not GUIDES.is_dir(), reason="the guides are not part of the repository")
def test_every_row_of_the_guides_is_in_the_table() -> None:
    """A row of the table covers the lines up to three after it: the bullets of one symptom, or two variables."""
    missing = []
    for guide in sorted(GUIDES.glob("*.txt")):
        lines = [int(line) for number, line, *_ in ROWS if number == guide.name[:3]]
        missing += [
            f"{guide.name[:3]}:{line} {text}"
            for line, text in rows_of(guide)
            if not any(known <= line <= known + 3 for known in lines)
        ]
    assert missing == []


def test_every_row_names_a_test_that_exists() -> None:
    assert len(ROWS) > 40
    for *_, reference in ROWS:
        file, _, name = reference.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions if name else functions, reference


def test_every_code_in_the_table_has_a_page() -> None:
    codes = {code for _, _, _, detector, _ in ROWS for code in re.findall(r"`([a-z]+\.[a-z][a-z-]+)`", detector)}
    assert len(codes) > 12
    assert codes <= {*catalog.pages()}
