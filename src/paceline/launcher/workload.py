"""What the ranks of a launch run: a function, a recipe, or a script, a module or any program as torchrun runs it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import LaunchError
from paceline.runtime import environment


@dataclass(frozen=True)
class Target:
    kind: Literal["script", "module", "program"]
    name: str
    args: tuple[str, ...] = ()
    local_rank: bool = False  # scripts for torch's older launcher take --local_rank=N before their own arguments

    def check(self) -> None:
        """Find a missing script before any rank starts."""
        if self.kind == "script" and not Path(self.name).exists():
            raise LaunchError(
                "no-script",
                f"There is no script at {self.name}.",
                fix="check the path; -m runs a module, --no-python any program",
            )

    def run(self) -> None:
        """Become the target: its arguments are this process's arguments, its code is `__main__`."""
        args = self.args
        if self.local_rank:
            info = environment.read_rank_info() or environment.RankInfo()
            args = (f"--local_rank={info.local_rank}", *args)
        if self.kind == "program":
            _replace_process(self.name, args)
        sys.argv = [self.name, *args]
        if self.kind == "module":
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            if Path(self.name).is_file():  # a folder with a __main__.py puts itself there
                sys.path.insert(0, str(Path(self.name).resolve().parent))
            runpy.run_path(str(Path(self.name).absolute()), run_name="__main__")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Target:
        return cls(values["kind"], values["name"], tuple(values["args"]), bool(values["local_rank"]))


def _replace_process(program: str, args: tuple[str, ...]) -> None:
    try:
        os.execvp(program, [program, *args])
    except OSError as error:
        raise LaunchError(
            "no-program",
            f"The program {program!r} can't be run: {error.strerror}.",
            fix="check its name and rights",
        ) from None


def _no_imports() -> None:
    pass


def _nothing(world: int) -> None:
    pass


@dataclass(frozen=True)
class Workload:
    """A body for forked ranks; with a target, which can run in new interpreters as well."""

    body: Callable[[], None]
    preload: Callable[[], None] = _no_imports  # what all ranks would import: once, before they are forked
    prepare: Callable[[int], None] = _nothing  # done before ranks are forked, given their number
    target: Target | None = None
    recipe: Mapping[str, Any] | None = None  # of `paceline train`

    @property
    def own_words(self) -> int:
        """How many of the last words that a person typed are the script's own."""
        return 0 if self.target is None else len(self.target.args) + 1

    @property
    def script(self) -> Path | None:
        return Path(self.target.name) if self.target is not None and self.target.kind == "script" else None
