"""Whether a run is running, and how it ended otherwise: from its lock and its ledger."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.run import lock
from paceline.run.folder import RunFolder
from paceline.watch.plain_text import clean

Event = dict[str, Any]

_INTERRUPTS = (129, 130, 138, 143)  # exit statuses of a launch: SIGHUP, SIGINT, SIGUSR1 and SIGTERM
_START_SECONDS = 120.0  # how long ranks may need until rank 0 takes the lock


@dataclass(frozen=True)
class RunState:
    name: Literal["running", "finished", "failed", "interrupted", "unknown"]
    reason: str = ""
    failure: Event | None = None  # of the ledger

    def __str__(self) -> str:
        return f"{self.name} ({clean(self.reason, 60)})" if self.reason else self.name


def find_state(folder: RunFolder, events: Sequence[Event]) -> RunState:
    """`events` are those of the ledger."""
    last = last_launch(events)
    try:
        is_held, holder = lock.look(folder)
    except OSError:  # there is no lock, or it can't be read
        is_held, holder = False, None
    if is_held:
        return RunState("running", _hang(last))
    for event in reversed(last):
        if event["event"] == "ended":
            return _ended(event, last)
        if event["event"] == "failed":
            return RunState("failed", _cause(event), event)
        if event["event"] == "finished":  # a script without a launcher
            return RunState("finished")
    if not last:
        return RunState("unknown", "" if events else "no ledger")
    if holder is None and 0 <= time.time() - last[-1]["time"] < _START_SECONDS:
        return RunState("running", "starting")
    host = str((holder or {}).get("host", ""))
    if host and host != socket.gethostname():  # it may still run there, and this is a copy
        return RunState("unknown", f"last seen running on {host}")
    return RunState("interrupted", "killed" if host else "")


def last_launch(events: Sequence[Event]) -> Sequence[Event]:
    """The events since ranks were last started: earlier failures were overcome by a restart."""
    starts = [number for number, event in enumerate(events) if event["event"] == "launched"]
    return events[starts[-1] :] if starts else []


def _ended(event: Event, last: Sequence[Event]) -> RunState:
    status = event.get("status")
    failure = next((each for each in reversed(last) if each["event"] == "failed"), None)
    if status == 0:
        return RunState("finished")
    if failure is None and status in _INTERRUPTS:
        return RunState("interrupted")
    return RunState("failed", f"exit status {status}" if failure is None else _cause(failure), failure)


def _cause(event: Event) -> str:
    return str(event.get("cause", "unknown cause"))


def _hang(last: Sequence[Event]) -> str:
    """That ranks make no progress, if that was the last thing the launcher had to say about it."""
    told = [event for event in last if event["event"] in ("hang", "continued", "stepped")]
    return "hung" if told and told[-1]["event"] == "hang" else ""
