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

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_LIBRARY = re.compile(r"(?:site|dist)-packages|[/\\]lib[/\\]|/lib/python\d|<frozen|<string>|/torch/|paceline/launcher/")
_EXCEPTION = re.compile(r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:\([\w.]+\))?(?::\s|:$|$)")
_ENDS_LIKE_ERROR = re.compile(r"(?:Error|Exception|Interrupt|Exit|Iteration|Expired)$")
_IGNORED = re.compile(r"^Exception ignored in|^--- Logging error ---|^Exception in thread .*(?:wandb|tqdm|NetStat)")
# Exceptions that repeat those of another process.
_WRAPPERS = re.compile(
    r"(?:ChildFailedError|ProcessRaisedException|ProcessExitedException|CalledProcessError|SignalException|SystemExit"
    r"|SpawnException|TrainingFailedError|TuneError|AirflowException|BrokenProcessPool|RayTaskError)$"
)
_HANDLED = re.compile(
    r"\bthrown while requesting\b"
    r"|\b(?:retry(?:ing)?|skipp(?:ing|ed)|ignor(?:ing|ed)|recover(?:ed|ing)|fall(?:ing|s)? ?back|continuing"
    r"|resum(?:ed|ing)|halving|reduc(?:ed?|ing) (?:the )?batch"
    r"|caught (?:an? )?(?:torch\.|[\w.]*(?:Error|[Ee]xception)))",
    re.IGNORECASE,
)
_WARNING = re.compile(r"^\[?W\d{3,4}\b|^\[W\b|\bWARN(?:ING)?\b|Warning: |\bwarn\b", re.I)
_NOTE = re.compile(r"^\[?I\d{3,4}\b|^\[I\b|(?<!=)\bINFO\b|\bDEBUG\b(?!=)")
_OF_NCCL = re.compile(r"NCCL WARN")
_QUIET_NAN = re.compile(r"\bloss['\"]?\s*(?:[=:]\s*|\s)(?:tensor\()?(?:nan|NaN|NAN)\b")
_STEP = re.compile(r"\b(?:steps?|iter(?:ation)?s?|epoch|batch|it)\b|\d%\|", re.IGNORECASE)
_METRIC = re.compile(r"\b(?:loss|lr|learning_rate|acc|tokens/s)\b\W{1,4}-?\d|\d ?(?:it/s|s/it)", re.IGNORECASE)
_VAGUE = re.compile(
    r"^terminate called after throwing|^\s*what\(\): |^\S+: error: |^(?:ERROR|FATAL|CRITICAL)\b|: Assertion `.+' failed"
    r"|\bfatal error\b|^panic: "
)
_NOT_STARTED = re.compile(r"^(?:sbatch|salloc|srun|slurmstepd): (?:fatal: |error: execve\(\): )")
_PACELINE = re.compile(r"^\[(?P<code>[a-z]+\.[a-z][a-z0-9-]+)\] ")
# Its traceback follows.
_OF_WORKER = re.compile(r"Caught \w+ in (?:DataLoader worker process|pin memory thread|replica) \d")
_SRUN_TASK = re.compile(r"^srun: error: \S+: task (?P<rank>\d+): (?!Terminated|Killed by)")
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with the following")
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)|^rank (?P<rank>\d+) failed first")
_TABLE_RANK = re.compile(r"^\s*rank\s+: (\d+) \(local_rank: \d+\)")
_LOCAL_RANK = re.compile(r"\(exitcode: -?\d+\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)")
# Of torch.distributed.launch, DeepSpeed, torch.multiprocessing.spawn, mpirun and Composer.
_REPORTED = re.compile(
    r"--local[-_]rank=(?P<argument>\d+)'.*(?:non-zero exit status|exits with return code|died with)"
    r"|\bprocess (?P<process>\d+) terminated with (?:signal|exit code)|process rank (?P<mpi>\d+) with PID"
    r"|\b[Rr]ank (?P<rank>\d+) crashed"
)
_NCCL_RANK = re.compile(r"NCCL INFO .*\brank (\d+) n[rR]anks \d")
_TABLE_EXIT = re.compile(r"^\s*exitcode\s+: -?\d+ \(pid: (\d+)\)")
_TABLE_HOST = re.compile(r"^\s*host\s+: (\S+)")

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
    if _WRAPPERS.search(name):
        return "consequence"
    # With an empty message, the next lines tell: those of torch.multiprocessing.spawn, for example.
    return "symptom" if text.rstrip().endswith(":") else "cause"


def _is_exception(text: str) -> bool:
    """Whether it is the last line of a traceback, which may be all that was copied."""
    found = _EXCEPTION.match(text)
    return found is not None and _ENDS_LIKE_ERROR.search(found["name"]) is not None


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
        if spawned := _SPAWNED.match(text):
            stream.spawned = int(spawned[1])
        if (stream.in_traceback or _FRAME.match(text)) and self._follow(stream, order, line):
            return
        if _TRACEBACK.search(text):
            stream.in_traceback, stream.place, stream.strange = True, "", 0
            return
        if _CHAIN.search(text):
            stream.is_chained = True
            return
        if stream.is_chained and _is_exception(text):  # its traceback was left out
            self._raised(stream, order, line, text.partition(":")[0])
            return
        if _IGNORED.match(text):
            stream.is_ignored = True
            return
        self._plain(stream, order, line)

    def _read_table(self, line: LogLine) -> None:
        """What launchers report at the end: which rank failed, with which exit status."""
        facts, text = self.facts, line.text
        if found := _ROOT_CAUSE.search(text):
            self._in_root_cause = True
            if found["rank"]:
                facts.root_rank = int(found["rank"])
        elif found := _TABLE_HOST.match(text):
            if self._in_root_cause and not facts.root_node:
                facts.root_node = found[1]
        elif found := _TABLE_RANK.match(text):
            self._table_rank = int(found[1])
            if self._in_root_cause and facts.root_rank is None:
                facts.root_rank = self._table_rank
        elif (found := _TABLE_EXIT.match(text)) and self._table_rank is not None:
            facts.rank_of_pid[int(found[1])] = self._table_rank  # not a local rank
        elif (found := _NCCL_RANK.search(text)) and line.pid is not None:
            facts.rank_of_pid.setdefault(line.pid, int(found[1]))
        elif found := _SRUN_TASK.match(text) or _REPORTED.search(text):
            number = next(int(group) for group in found.groups() if group)
            facts.root_rank = number if facts.root_rank is None else facts.root_rank
        elif found := _LOCAL_RANK.search(text):
            facts.rank_of_pid.setdefault(int(found["pid"]), int(found["rank"]))
            facts.root_rank = int(found["rank"]) if facts.root_rank is None else facts.root_rank

    def _follow(self, stream: _Stream, order: int, line: LogLine) -> bool:
        """Whether the line belongs to a traceback."""
        text = line.text
        if frame := _FRAME.match(text):
            stream.in_traceback, stream.strange = True, 0
            if not _LIBRARY.search(frame["file"]):
                inside = f", in {frame['function']}" if frame["function"] else ""
                stream.place = f"{frame['file']}:{frame['line']}{inside}"
            return True
        if text.startswith((" ", "\t")) or not text.strip():
            return True
        found = _EXCEPTION.match(text)
        if found and (_ENDS_LIKE_ERROR.search(found["name"]) or "." in found["name"] or not stream.strange):
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
        stream.chained, stream.is_chained = event, bool(_OF_WORKER.search(line.text))
        self.facts.events.append(event)

    def _plain(self, stream: _Stream, order: int, line: LogLine) -> None:
        text, rank = line.text, self._rank(stream, line)
        if known := self._match(text):
            code, role = known
            if not _is_exception(text):
                if _HANDLED.search(text) and code != "amp.loss-scale":
                    return
                if _NOTE.search(text) and not _OF_NCCL.search(text):
                    return
            if _WARNING.search(text) and not _OF_NCCL.search(text):
                self.facts.events.append(LogEvent(code, "mention", line, order, rank, is_specific=role == "cause"))
                return
            self.facts.events.append(LogEvent(code, role, line, order, rank))
        elif _QUIET_NAN.search(text):
            self.facts.nan_losses.append(LogEvent("numerics.nan", "cause", line, order, rank))
        elif _STEP.search(text) and _METRIC.search(text):
            self.facts.progress.setdefault((line.file, line.rank), []).append(order)
        elif _is_exception(text) and not _WARNING.search(text):
            role = "consequence" if _WRAPPERS.search(text.partition(":")[0]) else "symptom"
            self.facts.events.append(LogEvent(UNKNOWN, role, line, order, rank))
        elif _NOT_STARTED.match(text):
            self.facts.events.append(LogEvent(UNKNOWN, "symptom", line, order, rank))
        elif _VAGUE.search(text) and not _HANDLED.search(text):
            self.facts.events.append(LogEvent(UNKNOWN, "mention", line, order, rank))

    def _match(self, text: str) -> tuple[str, EventRole] | None:
        own = _PACELINE.match(text)
        if own and own["code"] in self._own_codes:
            return own["code"], "cause"
        found = match(text)
        return (found.code, found.role) if found else None

    def _rank(self, stream: _Stream, line: LogLine) -> int | None:
        if line.rank is not None:
            return line.rank
        if _TABLE_EXIT.match(line.text) or "received by PID" in line.text:
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
