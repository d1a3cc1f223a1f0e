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
from paceline.run.folder import RunFolder
from paceline.run.ledger import NO_WORD
from paceline.tools.cli import explain, runs
from paceline.tools.watch import page_values
from paceline.tools.watch.live_run import LiveRun

HERE = Path(__file__).parent
SCRIPT = HERE / "ending.py"
STARTS = (
    "paceline train", "paceline launch", "paceline.launch(fn)", "python", "paceline launch, own loop",
    "python, own loop", "torchrun",
)  # fmt: skip
EXCEPTIONS = tuple(f"exception in {place}" for place in ("model", "data", "callback", "main"))
KILLED_LAUNCHER = "SIGKILL of the launcher"
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
    loop = "own" if "own loop" in start else "train"
    return ("launch", "-n", "2", "--run", "end", str(SCRIPT), loop)


def _through_launch() -> None:
    import ending

    paceline.launch(ending.main, ranks=2)


def _through_torchrun() -> None:
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", "2", str(SCRIPT)])


def _python(*loop: str) -> None:
    sys.argv = [str(SCRIPT), *loop]
    runpy.run_path(str(SCRIPT), run_name="__main__")


_PROGRAMS = {
    "paceline.launch(fn)": _through_launch, "torchrun": _through_torchrun, "python": _python,
    "python, own loop": lambda: _python("own"),
}  # fmt: skip


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
        told = _printed(lambda: explain.explain(name))
        return Seen(said, state_text(line), _printed(lambda: runs.show(name)), page, values, told, found)


def _printed(command: Callable[[], object]) -> str:
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            command()
    except Exception as end:  # typer's Exit, or nothing to explain
        said.write(f"{type(end).__name__}: {end}" if type(end).__name__ != "Exit" else "")
    return said.getvalue()


def expected(start: str, way: str) -> tuple[str, str]:
    """The state, and why, as `paceline ls` says it."""
    rank = 0 if start.startswith("python") else 1
    is_launched = start.startswith("paceline")
    if way == "success":
        return "finished", ""
    if way == KILLED_LAUNCHER:
        return "interrupted", "launcher killed"
    if way.startswith("exception"):
        return (
            ("no run", "")
            if (start, way) == ("paceline train", "exception in main")
            else ("failed", "ValueError on rank")
        )
    if way in ("SIGINT", "SIGTERM") or way.startswith("hang"):
        # A loop of one's own has no handlers: SIGTERM kills its process.
        is_silent = (start, way) == ("python, own loop", "SIGTERM")
        return "interrupted", NO_WORD if is_silent else "SIGTERM" if way == "SIGTERM" else "SIGINT"
    if way == "sys.exit":
        return "failed", f"exit status 3 on rank {rank}"
    if not is_launched:
        return ("failed", f"{NO_WORD} on rank 1") if start == "torchrun" else ("interrupted", NO_WORD)
    return "failed", f"{'exit status 3' if way == 'os._exit' else way} on rank {rank}"


def disagreements(start: str, way: str, seen: Seen) -> list[str]:
    """What is wrong, or does not agree."""
    state, reason = expected(start, way)
    if state == "no run":
        return [] if seen.ls == state else [f"there is a run: {seen.ls}"]
    said = {
        "ls": seen.ls,
        "show": seen.show.splitlines()[0].removeprefix("runs/end: "),
        "page": state_text(seen.page["head"]),
        "json": state_text(seen.json),
    }
    wrong = [f"{where} says {text!r}" for where, text in said.items() if text != seen.ls]
    if not seen.ls.startswith(f"{state} ({reason}" if reason else state):
        wrong.append(f"ls says {seen.ls!r}, not {state} ({reason})")
    texts = {"show": seen.show, "explain": seen.explain}
    end, verdict = seen.json["end"] or {}, seen.page["about"]["verdict"] or {}
    if way.startswith("exception"):
        texts |= {"terminal": seen.terminal, "page": "\n".join([*verdict["lines"], verdict["place"]])}
        wrong += [
            f"{where} does not say {words!r}"
            for where, text in texts.items()
            for words in ("the injected reason", "raise ValueError(REASON)")
            if words not in text and (where, words) != ("explain", "raise ValueError(REASON)")
        ]
        found = (end.get("exception"), end.get("message"), Path(end.get("file", "")).name, end.get("code"))
        if found != ("ValueError", "the injected reason", SCRIPT.name, "raise ValueError(REASON)"):
            wrong.append(f"the record has {found}")
    elif reason:
        words = reason.partition(" on rank")[0]
        wrong += [f"{where} does not say {words!r}" for where, text in texts.items() if words not in text]
        if start.startswith("paceline") and way in ("SIGKILL", "SIGSEGV") and end.get("signal") != way:
            wrong.append(f"the record has the signal {end.get('signal')!r}")
    return wrong


def state_text(values: dict[str, Any]) -> str:
    return f"{values['state']} ({values['reason']})" if values["reason"] else values["state"]
