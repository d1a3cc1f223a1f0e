"""Mistakes that people make on their first day: a script or a command, and what its output must contain.

    Mistake("setting-typo", script("trainer = paceline.Trainer(model, bach=8)  # <-"), "config.unknown-key", "'batch'")

The line that ends with `# <-` is the culprit: its file and number must appear, too. `judge` returns what is missing.
"""

from __future__ import annotations

import linecache
import os
import re
import shlex
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import nodes

PRELUDE = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
criterion = nn.CrossEntropyLoss()
sgd = {"name": "sgd", "lr": 0.1}
"""
_MARK = "# <-"
_DEADLINE = 60.0  # seconds
PYTHON, LAUNCH = "python train.py", "paceline launch -n 2 train.py"


@dataclass(frozen=True)
class Mistake:
    name: str
    files: Mapping[str, str]
    wants: tuple[str, ...]  # words that must appear
    start: str = LAUNCH
    env: Mapping[str, str] = field(default_factory=dict)
    succeeds: bool = False  # a warning is enough
    unwanted: tuple[str, ...] = ()
    before: str = ""  # a command that was run before

    def __str__(self) -> str:
        return self.name

    @property
    def place(self) -> tuple[str, int] | None:
        """The file and the line that are to blame, if one is marked."""
        for name, text in self.files.items():
            for number, line in enumerate(text.splitlines(), start=1):
                if line.rstrip().endswith(_MARK):
                    return name, number
        return None

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            # The mark must not be part of what is shown.
            (folder / name).write_text(re.sub(rf" *{_MARK}$", "", text, flags=re.MULTILINE))

    def judge(self, status: int | None, said: str) -> list[str]:
        """What a reader of the output would miss."""
        problems = [f"does not say {words!r}" for words in self.wants if words not in said]
        problems += [f"says {words!r}" for words in self.unwanted if words in said]
        if (place := self.place) is not None:
            name, line = place
            if not re.search(rf'{re.escape(name)}(:|"?, line ){line}\b', said):
                problems.append(f"does not name {name}:{line}")
        if status is None or bool(status) == self.succeeds:
            problems.append("did not end" if status is None else f"exited with status {status}")
        return problems


def script(body: str, prelude: str = PRELUDE) -> dict[str, str]:
    return {"train.py": f"{prelude}\n{body.strip()}\n"}


def trainer(arguments: str, then: str) -> dict[str, str]:
    return script(f"trainer = paceline.Trainer({arguments})\n{then}")


def built(arguments: str) -> dict[str, str]:
    """A Trainer that cannot be built."""
    return script(f"trainer = paceline.Trainer({arguments})  {_MARK}\ntrainer.train(data, epochs=1)")


def trained(body: str, arguments: str = "model, sgd, criterion=criterion, batch=16, log_every=1") -> dict[str, str]:
    """A training of what the body defines."""
    return script(f"{body.strip()}\n\ntrainer = paceline.Trainer({arguments})\ntrainer.train(data, epochs=1)")


def run_forked(mistake: Mistake, folder: Path, launch: Callable[..., nodes.Launcher]) -> tuple[int | None, str]:
    """Run it in a fork of this process, in which torch is imported. The status is None if it did not end."""
    mistake.write(folder)

    def enter() -> None:
        os.environ.update(mistake.env)

    status, said, taken = None, "", socket.create_server(("127.0.0.1", 0))
    for command in filter(None, (mistake.before, mistake.start)):
        program, *arguments = shlex.split(command.replace("{port}", str(taken.getsockname()[1])))
        launcher = launch(
            *(arguments if program == "paceline" else ()),
            where=folder,
            enter=enter if program == "paceline" else lambda command=arguments: (enter(), _run_script(*command)),
        )
        with suppress(TimeoutError):
            nodes.eventually(lambda each=launcher: each.status is not None, seconds=_DEADLINE)
        status, said = launcher.status, launcher.said
    taken.close()
    return status, said


def _run_script(name: str, *arguments: str) -> None:
    """As `python NAME` does; ends the process."""
    module = ModuleType("__main__")
    module.__file__ = name
    sys.argv, sys.modules["__main__"] = [name, *arguments], module
    sys.path.insert(0, str(Path.cwd()))
    linecache.checkcache()
    try:
        path = str(Path(name).absolute())
        exec(compile(Path(name).read_bytes(), path, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        assert error.__traceback__ is not None
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        raise SystemExit(1) from None
    raise SystemExit(0)
