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
    failed {cause, rank, step, …}           why ranks were restarted or the launch ended: a `RunEnd`
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

How a run ended is one record, a `RunEnd`, which all commands and pages show. A launcher writes it, as `failed` or
`ended`, after it has found out which rank failed first. What ranks write, as `rank-ended`, counts where no launcher
did: under torchrun, for a plain script, in a notebook.

    find_end(events(folder))
    # RunEnd("failed", cause="signal", what="rank 1 was killed by SIGKILL in step 12", signal="SIGKILL", rank=1, …)
"""

from __future__ import annotations

import json
import signal as signals
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.run.user_frame import UserFrame
from paceline.text import rank_names


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


def opened(launch: RunFolder) -> dict[RunFolder, bool]:
    """The run folders that trainers of the last launch have opened, and whether their training has finished."""
    found: dict[RunFolder, bool] = {}
    of_trainer: dict[Any, RunFolder] = {}
    for event in events(launch):
        if event["event"] == "launched" and not event.get("generation"):  # earlier events belong to another launch
            found = {}
        elif event["event"] == "opened":
            of_trainer[event.get("trainer")] = run = RunFolder(Path(str(event.get("run"))))
            found[run] = False
        elif event["event"] in ("first-step", "finished") and (opened := of_trainer.get(event.get("trainer"))):
            found[opened] = event["event"] == "finished"
    return found


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


EndState = Literal["finished", "failed", "interrupted"]

NO_WORD = "killed or exited without a word"
_STOPPING = (signals.SIGHUP, signals.SIGINT, signals.SIGQUIT, signals.SIGUSR1, signals.SIGTERM)
_CONSEQUENCES = ("lost-connection", "timeout")  # of the end of another rank
_MAX_TEXT, _MAX_WORLD = 1 << 14, 1 << 16


@dataclass(frozen=True)
class RunEnd:
    state: EndState
    time: float = 0.0
    status: int | None = None  # exit status of the launch
    cause: str = ""  # what kind of failure, as in diagnose/exits.py
    rank: int | None = None  # that failed first
    step: int | None = None  # the last completed one
    what: str = ""  # a sentence
    signal: str = ""  # its name
    exception: str = ""  # its class, or the code of an error with one
    message: str = ""
    file: str = ""  # the line of the user's code
    line: int | None = None
    function: str = ""
    code: str = ""
    text: str = ""  # the traceback, or the last lines of the log of the rank
    fix: str = ""

    @property
    def reason(self) -> str:
        """In a few words: `SIGKILL on rank 1`."""
        named = self.signal or self.exception or self.cause
        if self.state == "failed" and named in ("", "exit"):
            named = f"exit status {self.status}" if self.status is not None else named or "unknown cause"
        return named if self.rank is None or self.state != "failed" else f"{named} on rank {self.rank}"

    @property
    def place(self) -> str:
        """`train.py:17, in main: trainer.train(data)`; empty if no code of the user was running."""
        return str(UserFrame(self.file, self.line or 0, self.function, self.code)) if self.file else ""

    def lines(self) -> list[str]:
        """What happened, the traceback or the end of the log, and what to do."""
        return [*filter(None, (self.what, *self.text.splitlines(), f"fix: {self.fix}" * bool(self.fix)))]

    def to_event(self) -> dict[str, Any]:
        """Values for the ledger, which adds the time."""
        found = {name: value for name, value in asdict(self).items() if value not in ("", None) and name != "time"}
        return found | ({"text": self.text[-_MAX_TEXT:]} if self.text else {})


def _read(event: Mapping[str, Any]) -> RunEnd:
    """Whoever wrote the ledger may have written anything."""
    kinds = {field.name: int if str(field.type).startswith("int") else str for field in fields(RunEnd)}
    known = {name: event[name] for name, kind in kinds.items() if type(event.get(name)) is kind}
    if known.get("state") not in get_args(EndState):
        number = known.get("status", 0) - 128 if event["event"] == "ended" else 0
        heard = next((each for each in _STOPPING if each == number), None)
        known["state"] = "interrupted" if heard else "finished" if known.get("status") == 0 else "failed"
        known |= {"signal": heard.name, "what": f"interrupted by {heard.name}"} if heard else {}
    return RunEnd(**known | {"time": float(event["time"])})


def last_start(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The events since ranks were last started: earlier failures were overcome by a restart."""
    starts = [number for number, event in enumerate(events) if event["event"] == "launched"]
    return events[starts[-1] :] if starts else events


def find_end(events: Sequence[Mapping[str, Any]]) -> RunEnd | None:
    """The end of the last start in a ledger; None if nobody noted one."""
    ended, ranks, world = None, dict[int, RunEnd](), 1
    for event in last_start(events):
        if event["event"] == "launched" and type(event.get("ranks")) is int:
            world = event["ranks"]
        elif event["event"] in ("failed", "ended"):
            last = _read(event)
            is_same = ended is not None and last.state != "finished" and event["event"] == "ended"
            ended = replace(ended, status=last.status) if ended is not None and is_same else last
        elif event["event"] == "rank-ended" and (end := _read(event)).rank is not None:
            ranks[end.rank] = end
        elif event["event"] == "finished":
            ranks[0] = _read({**event, "state": "finished"})
        elif event["event"] == "first-step":  # of another call to train()
            ranks.pop(0, None)
    return ended or _of_ranks(ranks, world)


def _of_ranks(ranks: Mapping[int, RunEnd], world: int) -> RunEnd | None:
    """Without a launcher: the first failure that is not the consequence of another one. Ranks that are waited for and
    left no record were killed, or called `os._exit`; the error of a rank that lost them says nothing about it."""
    ends = sorted(ranks.values(), key=lambda each: each.time)
    failed = [each for each in ends if each.state == "failed"]
    own = [each for each in failed if each.cause not in _CONSEQUENCES]
    stopped = [each for each in ends if each.state == "interrupted"]
    silent = [rank for rank in range(min(world, _MAX_WORLD)) if rank not in ranks]
    if failed and silent and not own and not stopped:
        later, was = rank_names(each.rank for each in failed if each.rank is not None), "were" if silent[1:] else "was"
        what = f"{rank_names(silent)} {was} {NO_WORD}; {later} then lost the connection"
        fix = f"check the limits of the scheduler or the container, and what {rank_names(silent)} printed"
        return RunEnd("failed", failed[0].time, failed[0].status, NO_WORD, silent[0], failed[0].step, what, fix=fix)
    return next(iter([*own, *stopped, *failed, *ends]), None)
