"""Failures in the lines of a log: known signatures, and exceptions that are not known.

Lines of several ranks may be interleaved, so a traceback is followed within the lines of one rank. In a chain of
exceptions the first known one counts: "During handling of the above exception, another exception occurred".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from paceline.diagnose.log_files.log_scan import LogLine

UNKNOWN = ""  # the code of an exception without a signature

_TEXTS = tomllib.loads(Path(__file__).with_name("log_lines.toml").read_text(encoding="utf-8"))
_LINES = {name: re.compile("".join(text)) for name, text in _TEXTS.items()}

EventRole = Literal["cause", "symptom", "waited", "consequence", "mention"]
Role = Literal["cause", "symptom", "waited", "consequence"]
ROLES: tuple[Role, ...] = get_args(Role)  # a match of the first is worth most


@dataclass(frozen=True)
class LogEvent:
    code: str  # UNKNOWN: an exception that has no signature
    role: EventRole
    line: LogLine
    order: int  # of the line in the log
    rank: int | None = None
    place: str = ""  # the last line of the user's code in its traceback
    is_raised: bool = False  # at the end of a traceback
    is_specific: bool = False  # of a mention: it would be a cause if it were an error


@dataclass
class LogFacts:
    """What was found in a log."""

    events: list[LogEvent] = field(default_factory=list)
    # By file and rank: the order of lines about steps.
    progress: dict[tuple[str, int | None], list[int]] = field(default_factory=dict)
    root_rank: int | None = None  # as the launcher reported it
    root_node: str = ""
    rank_of_pid: dict[int, int] = field(default_factory=dict)
    nan_losses: list[LogEvent] = field(default_factory=list)


@dataclass
class _Stream:
    """The lines of one rank, or those without one."""

    in_traceback: bool = False
    is_ignored: bool = False
    place: str = ""
    strange: int = 0  # lines that belong to no traceback, since its last frame
    chained: LogEvent | None = None  # the exception before, of the same chain
    is_chained: bool = False
    spawned: int | None = None


def _role_of_unknown(name: str, text: str) -> EventRole:
    if _LINES["wrappers"].search(name):
        return "consequence"
    # With an empty message, the next lines tell: those of torch.multiprocessing.spawn, for example.
    return "symptom" if text.rstrip().endswith(":") else "cause"


def _is_exception(text: str) -> bool:
    """Whether it is the last line of a traceback, which may be all that was copied."""
    found = _LINES["exception"].match(text)
    return found is not None and _LINES["ends_like_error"].search(found["name"]) is not None


def find_events(lines: Iterable[LogLine], own_codes: Iterable[str] = ()) -> LogFacts:
    """`own_codes`: those of paceline."""
    reader = _Reader(frozenset(own_codes))
    for order, line in enumerate(lines):
        reader.read(order, line)
    return reader.facts


class _Reader:
    def __init__(self, own_codes: frozenset[str]) -> None:
        self.facts = LogFacts()
        self._own_codes = own_codes
        self._streams: dict[tuple[str, int | None, int | None], _Stream] = {}
        self._table_rank: int | None = None
        self._in_root_cause = False

    def read(self, order: int, line: LogLine) -> None:
        stream = self._streams.setdefault((line.file, line.rank, line.pid), _Stream())
        text = line.text
        self._read_table(line)
        if spawned := _LINES["spawned"].match(text):
            stream.spawned = int(spawned[1])
        if (stream.in_traceback or _LINES["frame"].match(text)) and self._follow(stream, order, line):
            return
        if _LINES["traceback"].search(text):
            stream.in_traceback, stream.place, stream.strange = True, "", 0
            return
        if _LINES["chain"].search(text):
            stream.is_chained = True
            return
        if stream.is_chained and _is_exception(text):  # its traceback was left out
            self._raised(stream, order, line, text.partition(":")[0])
            return
        if _LINES["ignored"].match(text):
            stream.is_ignored = True
            return
        self._plain(stream, order, line)

    def _read_table(self, line: LogLine) -> None:
        """What launchers report at the end: which rank failed, with which exit status."""
        facts, text = self.facts, line.text
        if found := _LINES["root_cause"].search(text):
            self._in_root_cause = True
            if found["rank"]:
                facts.root_rank = int(found["rank"])
        elif found := _LINES["table_host"].match(text):
            if self._in_root_cause and not facts.root_node:
                facts.root_node = found[1]
        elif found := _LINES["table_rank"].match(text):
            self._table_rank = int(found[1])
            if self._in_root_cause and facts.root_rank is None:
                facts.root_rank = self._table_rank
        elif (found := _LINES["table_exit"].match(text)) and self._table_rank is not None:
            facts.rank_of_pid[int(found[1])] = self._table_rank  # not a local rank
        elif (found := _LINES["nccl_rank"].search(text)) and line.pid is not None:
            facts.rank_of_pid.setdefault(line.pid, int(found[1]))
        elif found := _LINES["srun_task"].match(text) or _LINES["reported"].search(text):
            number = next(int(group) for group in found.groups() if group)
            facts.root_rank = number if facts.root_rank is None else facts.root_rank
        elif found := _LINES["local_rank"].search(text):
            facts.rank_of_pid.setdefault(int(found["pid"]), int(found["rank"]))
            facts.root_rank = int(found["rank"]) if facts.root_rank is None else facts.root_rank

    def _follow(self, stream: _Stream, order: int, line: LogLine) -> bool:
        """Whether the line belongs to a traceback."""
        text = line.text
        if frame := _LINES["frame"].match(text):
            stream.in_traceback, stream.strange = True, 0
            if not _LINES["library"].search(frame["file"]):
                inside = f", in {frame['function']}" if frame["function"] else ""
                stream.place = f"{frame['file']}:{frame['line']}{inside}"
            return True
        if text.startswith((" ", "\t")) or not text.strip():
            return True
        found = _LINES["exception"].match(text)
        if found and (_LINES["ends_like_error"].search(found["name"]) or "." in found["name"] or not stream.strange):
            stream.in_traceback = False
            self._raised(stream, order, line, found["name"])
            return True
        stream.strange += 1
        if stream.strange > 6:
            stream.in_traceback = False
        return False

    def _raised(self, stream: _Stream, order: int, line: LogLine, name: str) -> None:
        is_ignored, stream.is_ignored = stream.is_ignored, False
        is_chained, stream.is_chained = stream.is_chained, False
        if is_ignored:
            return
        known = self._match(line.text)
        code, role = known or (UNKNOWN, _role_of_unknown(name, line.text))
        event = LogEvent(code, role, line, order, self._rank(stream, line), stream.place, is_raised=True)
        before = stream.chained if is_chained else None
        if before is not None and before in self.facts.events:
            if before.code or not code:
                return  # the first of the chain counts
            self.facts.events.remove(before)
            event = replace(event, place=before.place or event.place)
        stream.chained, stream.is_chained = event, bool(_LINES["of_worker"].search(line.text))
        self.facts.events.append(event)

    def _plain(self, stream: _Stream, order: int, line: LogLine) -> None:
        text, rank = line.text, self._rank(stream, line)
        if known := self._match(text):
            code, role = known
            if not _is_exception(text):
                if _LINES["handled"].search(text) and code != "amp.loss-scale":
                    return
                if _LINES["note"].search(text) and not _LINES["of_nccl"].search(text):
                    return
            if _LINES["warning"].search(text) and not _LINES["of_nccl"].search(text):
                self.facts.events.append(LogEvent(code, "mention", line, order, rank, is_specific=role == "cause"))
                return
            self.facts.events.append(LogEvent(code, role, line, order, rank))
        elif _LINES["quiet_nan"].search(text):
            self.facts.nan_losses.append(LogEvent("numerics.nan", "cause", line, order, rank))
        elif _LINES["step"].search(text) and _LINES["metric"].search(text):
            self.facts.progress.setdefault((line.file, line.rank), []).append(order)
        elif _is_exception(text) and not _LINES["warning"].search(text):
            role = "consequence" if _LINES["wrappers"].search(text.partition(":")[0]) else "symptom"
            self.facts.events.append(LogEvent(UNKNOWN, role, line, order, rank))
        elif _LINES["not_started"].match(text):
            self.facts.events.append(LogEvent(UNKNOWN, "symptom", line, order, rank))
        elif _LINES["vague"].search(text) and not _LINES["handled"].search(text):
            self.facts.events.append(LogEvent(UNKNOWN, "mention", line, order, rank))

    def _match(self, text: str) -> tuple[str, EventRole] | None:
        own = _LINES["paceline"].match(text)
        if own and own["code"] in self._own_codes:
            return own["code"], "cause"
        found = match(text)
        return (found.code, found.role) if found else None

    def _rank(self, stream: _Stream, line: LogLine) -> int | None:
        if line.rank is not None:
            return line.rank
        if _LINES["table_exit"].match(line.text) or "received by PID" in line.text:
            return self._table_rank
        return stream.spawned


class LogSignature(NamedTuple):
    code: str
    role: Role
    pattern: re.Pattern[str]


@cache
def signatures() -> tuple[LogSignature, ...]:
    text = Path(__file__).with_name("log_patterns.toml").read_text(encoding="utf-8")
    return tuple(
        LogSignature(code, table["role"], re.compile("|".join(table["patterns"])))
        for code, table in tomllib.loads(text).items()
    )


def match(text: str) -> LogSignature | None:
    """The signature of a line."""
    return next((signature for signature in signatures() if signature.pattern.search(text)), None)
