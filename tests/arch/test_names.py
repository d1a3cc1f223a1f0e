"""No name means two things. tests/arch/test_ratchets.py keeps the whole small."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import paceline

SOURCE = Path(paceline.__file__).parent


def repeated(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, path in names:
        places[name].append(path.relative_to(SOURCE).as_posix())
    return {name: found for name, found in places.items() if len(found) > 1}


def public_classes(path: Path) -> Iterable[str]:
    tree = ast.parse(path.read_text())
    return (node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


FILES = sorted(SOURCE.rglob("*.py"))


def test_no_two_public_classes_share_a_name() -> None:
    assert repeated((name, path) for path in FILES for name in public_classes(path)) == {}


def test_no_two_modules_outside_cli_and_features_share_a_name() -> None:
    """A feature of training has the name of what it uses."""
    apart = (SOURCE / "tools/cli", SOURCE / "train/features")
    modules = [path for path in FILES if path.name != "__init__.py" and path.parent not in apart]
    assert len(modules) > 150
    assert repeated((path.stem, path) for path in modules) == {}


def test_no_public_name_hides_a_package() -> None:
    """`import paceline.x` binds the submodule `x` on the package, so a public callable must not be named after one."""
    packages = {
        path.stem if path.is_file() else path.name for path in SOURCE.iterdir() if not path.name.startswith("_")
    }
    clashing = [name for name in paceline.__all__ if name in packages]
    assert [name for name in clashing if not isinstance(getattr(paceline, name), ModuleType)] == []
