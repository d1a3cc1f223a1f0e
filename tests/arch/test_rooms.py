"""Rooms stay small, and no name means two things."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import paceline

SOURCE = Path(paceline.__file__).parent

# Python lines per room. Lower a ceiling freely; raise it only together with a decision page (020 to 031).
CEILINGS = {
    "": 670,
    "config": 1_480,
    "plan": 2_250,
    "run": 1_570,
    "diagnose": 3_330,
    "watch": 2_520,
    "runtime": 3_320,
    "launcher": 6_350,
    "models": 2_950,
    "data": 3_250,
    "precision": 400,
    "parallel": 3_850,
    "sync": 1_330,
    "optim": 880,
    "checkpoint": 2_600,
    "monitor": 1_700,
    "guard": 3_050,
    "train": 8_500,
    "doctor": 3_700,
    "bench": 1_450,
    "search": 1_750,
    "testing": 630,
    "cli": 2_200,
}


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def repeated(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, path in names:
        places[name].append(path.relative_to(SOURCE).as_posix())
    return {name: found for name, found in places.items() if len(found) > 1}


def public_classes(path: Path) -> Iterable[str]:
    tree = ast.parse(path.read_text())
    return (node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def page_lines(path: Path) -> int:
    """Lines of docstrings of public names: with an example, they are pages of the reference (decision 031)."""
    strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr))
    return sum(
        (each.end_lineno or 0) - each.lineno
        for each in strings
        if isinstance(each, ast.Constant) and "Example:\n" in str(each.value)
    )


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_room_stays_below_its_ceiling() -> None:
    lines: dict[str, int] = defaultdict(int)
    for path in FILES:
        lines[room_of(path)] += len(path.read_text().splitlines()) - page_lines(path)
    assert {room: count for room, count in lines.items() if count > CEILINGS[room]} == {}


def test_no_two_public_classes_share_a_name() -> None:
    assert repeated((name, path) for path in FILES for name in public_classes(path)) == {}


def test_no_two_modules_outside_cli_share_a_name() -> None:
    modules = [path for path in FILES if path.name != "__init__.py" and room_of(path) != "cli"]
    assert len(modules) > 150
    assert repeated((path.stem, path) for path in modules) == {}


def test_no_public_name_hides_a_room() -> None:
    """`import paceline.x` binds the submodule `x` on the package, so a public callable must not be named after one."""
    rooms = {path.stem if path.is_file() else path.name for path in SOURCE.iterdir() if not path.name.startswith("_")}
    clashing = [name for name in paceline.__all__ if name in rooms]
    assert [name for name in clashing if not isinstance(getattr(paceline, name), ModuleType)] == []
