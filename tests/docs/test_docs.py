"""Links between pages lead somewhere, and files that pages name exist. test_blocks.py runs what pages contain."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def test_guides_are_short() -> None:
    """Limits, edge cases and long tables belong to docs/reference, reasons to docs/decisions."""
    lengths = {page.name: len(page.read_text().splitlines()) for page in (ROOT / "docs" / "guides").glob("*.md")}
    assert {name: lines for name, lines in lengths.items() if lines > 250} == {}
