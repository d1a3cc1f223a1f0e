"""The script that a run belongs to, which is its default name. `resume: auto` does not continue that of another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from paceline.run import regular_files
from paceline.run.folder import RunFolder, existing_runs

_FIRST_MODELS: dict[str, str] = {}  # script → the class of the first model that it trains


def main_script() -> Path | None:
    """The script of this process; None in a notebook, an interpreter or an installed program."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or sys.executable).absolute()
    installed = {Path(sys.executable).parent, Path(__file__).parents[1]}
    return None if "site-packages" in path.parts or path.parent in installed else path


def default_name(model: str) -> str:
    """The name of a run without a name, for a model of this class. A script's second model has its class added."""
    script = main_script()
    if script is None:
        return model
    name = (script.parent if script.stem == "__main__" else script).stem
    return name if _FIRST_MODELS.setdefault(str(script), model) == model else f"{name}-{model}"


def script_of(folder: RunFolder) -> str | None:
    """The script that last trained in a folder, relative to its parent, with which it may be moved; None if unknown."""
    try:
        return str(json.loads(regular_files.read_bytes(folder.derived))["script"]["value"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(name: str, script: Path | None) -> tuple[RunFolder | None, RunFolder | None]:
    """The newest run of a name that belongs to `script`, or to an unknown one; and a newer one that does not."""
    other = None
    for folder in existing_runs(name):
        if script is None or script_of(folder) in (None, os.path.relpath(script, folder.path.parent)):
            return folder, other
        other = other or folder
    return None, other
