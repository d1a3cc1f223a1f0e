"""A script as what ranks run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.launcher.target import Target
    from paceline.launcher.workload import Workload


def work_of(target: Target) -> Workload:
    from paceline.launcher.workload import Workload

    def preload() -> None:
        """The Trainer, where the script uses it: two seconds that each rank would spend at every start."""
        if target.kind == "script" and _imports_paceline(Path(target.name)):
            import paceline.train.trainer  # noqa: F401

    return Workload(target.run, preload, target=target)


def _imports_paceline(script: Path) -> bool:
    """Whether it says so at its top level."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # the ranks will tell
    names = [name.name for each in statements if isinstance(each, ast.Import) for name in each.names]
    names += [each.module or "" for each in statements if isinstance(each, ast.ImportFrom)]
    return any(name.split(".")[0] == "paceline" for name in names)
