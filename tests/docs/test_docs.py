"""Every line of example code in the docs runs. test_examples.py runs the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page.parent.name != "tutorial"  # whose blocks build on each other: test_tutorial.py runs them, as a notebook
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_docs_runs(block: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "block.py").write_text(block)
    if "README.md-0" in request.node.name:  # in a new interpreter: this is what a newcomer pastes into a file
        command = [sys.executable, "block.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    else:
        done = forked.script(tmp_path / "block.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def anchors(page: Path) -> set[str]:
    """The fragment of each heading, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, fragment = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not fragment or fragment in anchors(target))


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (page, link)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text())
    ]
    assert len(links) > 20
    assert [f"{page.name}: {link}" for page, link in links if not leads_somewhere(page, link)] == []
    assert not leads_somewhere(ROOT / "README.md", "docs/guides/launch.md#no-such-heading")


def test_files_that_pages_name_exist() -> None:
    source = ROOT / "src" / "paceline"
    named = [
        (page, name)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for name in re.findall(r"\b(?:[\w-]+/)+[a-z_\d]+\.py\b", page.read_text())
    ]
    assert len(named) > 50
    assert [
        f"{page.name}: {name}" for page, name in named if not any((top / name).is_file() for top in (ROOT, source))
    ] == []
