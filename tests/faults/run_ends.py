"""Six ways to start a training × twelve ways to end it, and what each reader of the run says about its end.

What the training does stands in ending.py. Ranks, signals, commands and files are real; what stands in a process that
already has torch is forked from this one (`forked.py`).
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodes
import paceline
from paceline.cli import explain, runs
from paceline.run.folder import RunFolder
from paceline.watch import page_values
from paceline.watch.live_run import LiveRun

HERE = Path(__file__).parent
SCRIPT = HERE / "ending.py"
STARTS = ("paceline train", "paceline launch", "paceline.launch(fn)", "torchrun", "python", "own loop")
EXCEPTIONS = tuple(f"exception in {place}" for place in ("model", "data", "callback", "main"))
WAYS = ("success", *EXCEPTIONS, "SIGINT", "SIGTERM", "SIGKILL", "SIGSEGV", "os._exit", "sys.exit", "hang, Ctrl-C")

RECIPE = """
model: {name: "ending:build"}
data: {name: "ending:make"}
metrics: ["ending:metric"]
batch: 8
eval_every: 6
run: end
train: {max_steps: STEPS}
"""


@dataclass(frozen=True)
class Seen:
    """What a person is told after a run has ended."""

    terminal: str
    ls: str
    show: str
    page: dict[str, Any]
    json: dict[str, Any]
    explain: str
    folders: list[str]


def see(start: str, way: str, folder: Path, launch: Callable[..., nodes.Launcher]) -> Seen:
    """Let it happen in an empty folder."""

    def enter() -> None:
        os.environ.update(WAY=way, TARGET=str(os.getpid()), PYTHONPATH=os.pathsep.join([*sys.path, str(HERE)]))
        sys.path.insert(0, str(HERE))

    process = launch(*_arguments(start, way, folder), enter=enter, program=_PROGRAMS.get(start))
    for marker in ("hangs", "heard") if way.startswith("hang") else ():  # a loop of one's own ends at the first
        nodes.eventually(lambda path=folder / marker: path.exists() or process.status is not None)
        process.send(signal.SIGINT)
    process.end()
    return read(folder, process.said)


def _arguments(start: str, way: str, folder: Path) -> tuple[str, ...]:
    if start == "paceline train":
        steps = 1_000_000 if way in ("SIGINT", "SIGTERM") else 12
        (folder / "recipe.yaml").write_text(RECIPE.replace("STEPS", str(steps)))
        return ("train", "recipe.yaml", "-n", "2")
    loop = "own" if start == "own loop" else "train"
    return ("launch", "-n", "2", "--run", "end", str(SCRIPT), loop)


def _launch_function() -> None:
    import ending

    paceline.launch(ending.main, ranks=2)


def _torchrun() -> None:
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", "2", str(SCRIPT)])


def _python() -> None:
    sys.argv = [str(SCRIPT)]
    runpy.run_path(str(SCRIPT), run_name="__main__")


_PROGRAMS = {"paceline.launch(fn)": _launch_function, "torchrun": _torchrun, "python": _python}


def read(folder: Path, said: str) -> Seen:
    with chdir(folder):
        found = [path.name for path in Path("runs").iterdir()] if Path("runs").is_dir() else []
        name = "end" if "end" in found else next(iter(found), "")
        listed = json.loads(_printed(lambda: runs.ls(Path("runs"), json=True))) if name else [{}]
        if not name:
            return Seen(said, "no run", "", {}, {}, "", found)
        live = LiveRun(RunFolder(Path("runs", name).absolute()))
        page = {"head": page_values.head(live), "about": page_values.about(live)}
        values = json.loads(_printed(lambda: runs.show(name, json=True)))
        line = next(each for each in listed if each["name"] == name)
        state = f"{line['state']} ({line['reason']})" if line["reason"] else line["state"]
        told = _printed(lambda: explain.explain(f"runs/{name}"))
        return Seen(said, state, _printed(lambda: runs.show(name)), page, values, told, found)


def _printed(command: Callable[[], object]) -> str:
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            command()
    except Exception as end:  # typer's Exit, or nothing to explain
        said.write(f"{type(end).__name__}: {end}" if type(end).__name__ != "Exit" else "")
    return said.getvalue()
