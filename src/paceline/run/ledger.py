"""The ledger of a run: events from which diagnose/goodput.py computes where the time went.

    Ledger(folder).note("saved", step=200, seconds=0.04)
    events(folder)               # [{"time": 1763220000.1, "event": "saved", "step": 200, "seconds": 0.04}]

The launcher and rank 0 append to the same file, each line in a single write. A line holds the wall-clock time in
seconds, an event and its values:

    launched {nodes, ranks, generation}     by the launcher; generation 0 starts a run, later ones are restarts;
             {resumed}                      the user or a scheduler started the job again: the pause is not counted
    ranks-started
    hang {kind, ranks, seconds}             ranks have made no progress for so long
    continued {seconds}                     they made progress again, so long after that
    failed {cause, rank, step, …}           why its ranks were restarted, or the launch ended: a `RunEnd` (run_end.py)
    ended {status, state}

    joined {seconds}                        by rank 0: the process group is initialized, and how long that took
    opened {run, name, generation}          the trainer writes to this run folder
    restored {step, seconds}                a checkpoint was loaded
    first-step {step, steps, seconds}       the first steps of a call to train(), compilation included
    stepped {step, waited}                  now and then; waited: seconds for data since then
    saved, save-failed {step, seconds}      seconds: how long training was stalled
    evaluated {seconds}
    warning {text}
    finished {step, waited}
    rank-ended {state, rank, …}             by any rank: how a call to train(), or its process, ended; a `RunEnd`

`step` is the number of completed steps. Events of rank 0 have a `trainer`: 0 for its first Trainer, 1 for its second.
Readers ignore unknown events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.run import regular_files
from paceline.run.folder import RunFolder


class Ledger:
    """Appends events to the ledger of a run folder; without one it does nothing."""

    def __init__(self, folder: RunFolder | None) -> None:
        self._path = None if folder is None else folder.ledger

    def note(self, event: str, /, *, at: float | None = None, **values: Any) -> None:
        """Append an event. Write errors are ignored: the ledger must not fail the run."""
        if self._path is None:
            return
        when = round(time.time() if at is None else at, 4)
        line = json.dumps({"time": when, "event": event, **values}) + "\n"
        with suppress(OSError):
            regular_files.append(self._path, line.encode())


def events(folder: RunFolder) -> list[dict[str, Any]]:
    """All events, sorted by time."""
    try:
        lines = regular_files.read_text(folder.ledger).splitlines()
    except OSError:
        return []
    return sorted(_parsed(lines), key=lambda event: float(event["time"]))


def _parsed(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        text = line[max(0, line.rfind('{"time"')) :]  # after the partial line of a killed writer
        with suppress(ValueError, RecursionError, TypeError):  # TypeError: the time is not a number
            event = json.loads(text)
            if isinstance(event, dict) and abs(event.get("time", 1e12)) < 1e12 and "event" in event:
                yield event


def opened(launch: RunFolder) -> list[RunFolder]:
    """The run folders that trainers of the last launch have opened."""
    found: list[RunFolder] = []
    for event in events(launch):
        if event["event"] == "launched" and not event.get("generation"):  # earlier events belong to another launch
            found = []
        elif event["event"] == "opened":
            found.append(RunFolder(Path(str(event.get("run")))))
    return list(dict.fromkeys(found))


def opened_before(folder: RunFolder, name: str, generation: int) -> RunFolder | None:
    """The run folder that a trainer of this name used before this launch restarted its ranks: the first one that no
    trainer of this generation has opened yet."""
    earlier: list[str] = []
    taken: set[str] = set()
    for event in events(folder):
        if event["event"] == "launched" and not event.get("generation"):  # earlier events belong to another launch
            earlier, taken = [], set()
        elif event["event"] == "launched" and event.get("resumed"):  # the same launch, days later
            earlier, taken = [*earlier, *taken], set()
        elif event["event"] == "opened" and event.get("name") == name:
            if event.get("generation") == generation:
                taken.add(str(event["run"]))
            else:
                earlier.append(str(event["run"]))
    return next((RunFolder(Path(run)) for run in earlier if run not in taken), None)
