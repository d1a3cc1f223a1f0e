"""`paceline init`: write a starter project: a model and a dataset, a recipe that names them, and a script."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import examples
from paceline.errors import ConfigError

EXAMPLES = examples("init", "init my-project")
STARTER = Path(__file__).with_name("starter")  # NAME.txt: they are data, not modules of this package


def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="where to write; default: here")] = Path(),
) -> None:
    """Write a recipe and a script that train a small model of your own, in seconds on a CPU. Nothing is overwritten."""
    contents = {folder / source.stem: source.read_text() for source in sorted(STARTER.glob("*.txt"))}
    existing = [path for path in contents if path.exists() or path.is_symlink()]
    if existing:
        raise ConfigError(
            "file-exists",
            f"{', '.join(map(str, existing))} already exist{'s' * (len(existing) == 1)}.",
            fix="choose another folder: paceline init FOLDER",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            with path.open("x") as file:  # another process may have created it by now
                file.write(text)
    except OSError as error:
        what = f"Can't write to {folder}: {error.strerror}."
        raise ConfigError("not-writable", what, fix="choose another folder: paceline init FOLDER") from None
    print(f"written: {', '.join(map(str, contents))}\n\nnext:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    print("  paceline train recipe.yaml -n 2\n  paceline launch -n 2 train.py")
