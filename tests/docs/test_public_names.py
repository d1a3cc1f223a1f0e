"""Docs and messages refer users to public names only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import paceline

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
USER_PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    SOURCE / "diagnose" / "catalog.md",
    *(page for folder in ("guides", "reference", "errors") for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
]
PAGES = sorted(
    {*USER_PAGES, *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*.yaml"), ROOT / "CONTRIBUTING.md"}
)
PUBLIC = {*paceline.__all__, "testing"}
FILES = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]


def is_public(first: str, *rest: str) -> bool:
    """Whether `paceline.FIRST.REST` is a public name: on the package, or defined by one of its public modules."""
    if first not in PUBLIC:
        return False
    value = getattr(paceline, first)
    return not rest or not isinstance(getattr(value, rest[0], value), ModuleType)


def private_names(text: str) -> list[str]:
    """Names below `paceline` that are not public. A name with a hyphen is an error code."""
    names = re.findall(r"(?<![\w/.-])paceline(?:\.[A-Za-z_]\w*+)++(?!-)", text)
    return [name for name in names if not is_public(*name.split(".")[1:])]


def message_strings(path: Path) -> Iterator[str]:
    """The texts in a module that a user may read: strings of several words, and the help of commands."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_help = path.parent.name == "cli"
            if " " in node.value and (is_help or id(node) not in docstrings):
                yield node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_public_names_only(page: Path) -> None:
    assert private_names(page.read_text()) == []


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_for_users_points_at_no_source_file(page: Path) -> None:
    named = re.findall(r"[\w/]+\.py", page.read_text())
    assert [name for name in named if any(name == file or name.endswith(f"paceline/{file}") for file in FILES)] == []


def test_messages_name_public_names_only() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {text}"
        for path in SOURCE.rglob("*.py")
        for text in message_strings(path)
        if private_names(text) or re.search(r"\bpaceline/\w+/\w+\.py\b", text)
    }
    assert found == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Call `paceline.checkpoint.external.load`.", ["paceline.checkpoint.external.load"]),
        ("from paceline.plan.slicing import shares", ["paceline.plan.slicing"]),
        ("from paceline.train import trainer", ["paceline.train"]),
        ("paceline.tools.testing.runner.ranks", ["paceline.tools.testing.runner.ranks"]),
        ("paceline.Tranier(model)", ["paceline.Tranier"]),
        ("Call paceline.dist.barrier(), paceline.testing.parity(…) or paceline.Loss. It ends with paceline.", []),
        ("raise paceline.errors.ConfigError", []),
        ("[paceline.unknown-code]", []),
        ("~/.paceline/token, /opt/paceline.d, paceline.yaml is not a name", ["paceline.yaml"]),
    ],
)
def test_the_check_finds_private_names(text: str, found: list[str]) -> None:
    assert private_names(text) == found
