"""How a run ended: one record in its ledger, which all commands and pages show.

    find_end(ledger.events(folder))
    # RunEnd("failed", cause="signal", what="rank 1 was killed by SIGKILL in step 12", signal="SIGKILL", rank=1, …)

A launcher writes it, as the event `failed` or `ended`, after it has found out which rank failed first. Ranks write
their own, as `rank-ended`, whoever started them: rank 0 when a call to train() returns, and each rank that an exception
or a signal ends. They count where no launcher wrote one: under torchrun, for a plain script, in a notebook.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from paceline.run.user_frame import UserFrame
from paceline.text import rank_names

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
    left no record were killed, or called `os._exit`."""
    ends = sorted(ranks.values(), key=lambda each: each.time)
    failed = [each for each in ends if each.state == "failed"]
    own = [each for each in failed if each.cause not in _CONSEQUENCES]
    stopped = [each for each in ends if each.state == "interrupted"]
    silent = [rank for rank in range(min(world, _MAX_WORLD)) if rank not in ranks]
    if failed and silent and not own and not stopped:
        lost = failed[0]
        what = f"{rank_names(silent)} {NO_WORD}; {lost.what}"
        return replace(lost, cause=NO_WORD, rank=silent[0], what=what, exception="", message="", file="")
    return next(iter([*own, *stopped, *failed, *ends]), None)
