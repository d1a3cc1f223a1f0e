"""What happened first in a log, or in the logs of all ranks: `paceline explain LOGFILE`.

Every rank that survives a failure fails later, for lack of the one that failed first, and says so louder. So a cause
comes before what may be its symptom (an exit by SIGKILL), that before a rank that waited in vain, and consequences
count only if there is nothing else. Among equals, the first in the log counts.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.diagnose import catalog
from paceline.diagnose.log_files import log_events, log_scan
from paceline.diagnose.log_files.log_events import UNKNOWN, LogEvent, LogFacts
from paceline.diagnose.log_files.log_scan import LogLine, parse
from paceline.errors import PacelineError
from paceline.text import rank_names, shorten

# That many lines about later steps mean that a rank survived an error.
_SURVIVED_LINES, _SURVIVED_TRACEBACK_LINES = 3, 10
_NAN_LINES = 2  # a single one may be a metric of an empty batch
_MAX_THEN = 4  # consequences that are shown
MAX_QUOTED = 300  # characters of a line
_PID = re.compile(r"\bpid[:= ]+(\d+)", re.IGNORECASE)
_GPU = re.compile(r"\bGPU (\d+)\b")
_COLLECTIVE = re.compile(r"(?:SeqNum=(?P<number>\d+), )?OpType=(?P<operation>\w+)")
_OF_WHOLE_JOB = ("slurm.cancelled", "slurm.node-failed", "slurm.preempted", "slurm.time-limit")
_ABOUT_GPU = re.compile(r"\b(?:gpu|cuda|nccl|device|bf16)", re.IGNORECASE)
_OF_KERNEL = ("cuda.ecc", "cuda.gpu-lost", "host.oom-killer")
_WORLD = re.compile(r"world_size=(\d+)")
_LAST_ERROR_LINES = 5
_WAITED = ("nccl.timeout", "gloo.timeout", "rendezvous.timeout")
_WIDTH = 110
_LABELS = ("Why", "Check", "Fix")


@dataclass(frozen=True)
class LogVerdict:
    code: str  # "unknown": a failure without a signature; "none": no failure was found
    rank: int | None = None
    node: str = ""
    ranks: tuple[int, ...] = ()  # all that report the same
    line: LogLine | None = None  # that tells
    place: str = ""  # the line of the user's code
    then: tuple[LogEvent, ...] = ()  # consequences, one per code

    def to_json(self) -> dict[str, Any]:
        line = self.line
        return {
            "code": self.code,
            "rank": self.rank,
            "ranks": list(self.ranks),
            "node": self.node or None,
            "file": line.file if line else None,
            "line": line.number if line else None,
            "text": line.text.strip()[:MAX_QUOTED] if line else None,
            "place": self.place or None,
            "then": [{"code": each.code, "rank": each.rank, "line": each.line.number} for each in self.then],
        }


def explain_log(path: str) -> LogVerdict:
    """`path`: a log, a folder with the logs of ranks, or "-" for standard input."""
    return find_verdict(log_events.find_events(_lines(path), catalog.pages()))


def explain_text(text: str) -> LogVerdict:
    lines = (parse("message", number, line) for number, line in enumerate(text.splitlines(), 1))
    return find_verdict(log_events.find_events(lines, catalog.pages()))


def _lines(path: str) -> Iterator[LogLine]:
    if path == "-":
        with log_scan.spooled(sys.stdin.buffer) as (text, size):
            yield from log_scan.read(text, "standard input", size)
        return
    files = log_scan.log_files(Path(path))
    if not files:
        raise PacelineError(
            "no-logs", f"No logs in {path}.", fix="pass a log, or a folder with *.log, *.out or *.err files"
        )
    unreadable: list[str] = []
    for file in files:
        try:
            with log_scan.opened(file) as (text, size):
                yield from log_scan.read(text, str(file), size)
        except OSError as error:
            unreadable.append(f"{file}: {error.strerror or error}")
    if len(unreadable) == len(files):
        raise PacelineError("no-logs", f"Cannot read {unreadable[0]}.", fix="check its permissions")


def find_verdict(facts: LogFacts) -> LogVerdict:
    events = [each for each in facts.events if not _was_survived(each, facts)]
    first = _first(events, facts.nan_losses)
    if first is None:
        return LogVerdict("none")
    alike = [each for each in events if each.code == first.code and first.code]
    ranks = sorted({rank for each in alike if (rank := _rank_of(each, facts)) is not None})
    rank = _missing_rank(alike) if first.code in _WAITED else _rank_of(first, facts)
    if rank is None and len(ranks) == 1:
        rank = ranks[0]
    if first.code in _OF_WHOLE_JOB:
        rank = None
    is_root = facts.root_rank is not None and facts.root_rank == rank
    node = first.line.node or (facts.root_node if is_root else "")
    then: dict[str, LogEvent] = {}
    for each in events:
        if each.code not in (first.code, UNKNOWN) and each.role != "mention" and each.order > first.order:
            then.setdefault(each.code, replace(each, rank=_rank_of(each, facts)))
    shown = tuple(then.values())[:_MAX_THEN]
    return LogVerdict(first.code or "unknown", rank, node, tuple(ranks), first.line, first.place, shown)


def _first(events: Sequence[LogEvent], nan_losses: Sequence[LogEvent]) -> LogEvent | None:
    found = {role: next((each for each in events if each.role == role), None) for role in log_events.ROLES}
    cause, symptom = found["cause"], found["symptom"]
    if cause is not None and not cause.code:
        # An exception without a signature, unless something known came before it, or was said in passing.
        if symptom is not None and symptom.code and symptom.order < cause.order:
            cause = symptom
        elif len(nan_losses) >= _NAN_LINES and nan_losses[0].order < cause.order:
            cause = nan_losses[0]
        else:
            cause = next((each for each in events if _tells_more(each, cause)), cause)
    if cause is None and symptom is None and len(nan_losses) >= _NAN_LINES:
        return nan_losses[0]
    best = cause or symptom or found["waited"] or found["consequence"]
    if best is None:
        return None
    if best.code in ("nccl.internal-error", "nccl.system-error"):  # NCCL's "Last error" tells why
        near = (each for each in events if each.rank == best.rank and each.order < best.order + _LAST_ERROR_LINES)
        best = next((each for each in near if each.code == "nccl.lost-peer"), best)
    if best.role != "cause":  # a warning may tell more about it
        family = best.code.partition(".")[0]
        told = (each for each in events if each.role == "mention" and each.order < best.order and each.is_specific)
        best = next((each for each in told if each.code.partition(".")[0] == family), best)
    if best.role == "consequence" and best.code in ("torchrun.child-failed", "process.abort", UNKNOWN):
        said = [each for each in events if each.role == "mention"]
        return next((each for each in said if each.code), next(iter(said), best))
    return best


def _tells_more(event: LogEvent, unknown: LogEvent) -> bool:
    """Whether it is the reason for an exception without a signature: a message of the kernel, which is printed later,
    or a warning about the GPU before an exception about it."""
    if event.code in _OF_KERNEL:
        return True
    about_gpu = event.role == "mention" and event.is_specific and event.code.startswith("cuda.")
    return about_gpu and event.order < unknown.order and bool(_ABOUT_GPU.search(unknown.line.text))


def _was_survived(event: LogEvent, facts: LogFacts) -> bool:
    """Whether the rank has taken steps after it."""
    later = sum(order > event.order for order in facts.progress.get((event.line.file, event.line.rank), ()))
    return later >= (_SURVIVED_TRACEBACK_LINES if event.is_raised else _SURVIVED_LINES)


def _rank_of(event: LogEvent, facts: LogFacts) -> int | None:
    if event.line.pid in facts.rank_of_pid:  # NCCL numbers the devices of a node, not ranks
        return facts.rank_of_pid[event.line.pid]
    if event.rank is not None:
        return event.rank
    for pid in map(int, _PID.findall(event.line.text)):
        if pid in facts.rank_of_pid:
            return facts.rank_of_pid[pid]
    if (event.role in ("cause", "symptom") or event.code == "torchrun.child-failed") and facts.root_rank is not None:
        return facts.root_rank
    gpu = _GPU.search(event.line.text) if event.code.startswith("cuda.") else None
    return int(gpu[1]) if gpu else None


def _missing_rank(waited: Sequence[LogEvent]) -> int | None:
    """The rank that the others waited for: the only one that made another call, or waits in an earlier one."""
    calls: dict[int, tuple[int, str]] = {}
    worlds = [int(found[1]) for event in waited if (found := _WORLD.search(event.line.text))]
    for event in waited:
        found = _COLLECTIVE.search(event.line.text)
        if event.rank is not None and (found or worlds):
            calls.setdefault(event.rank, (int(found["number"] or 0), found["operation"]) if found else (0, ""))
    by_call: dict[tuple[int, str], list[int]] = {}
    for rank, call in calls.items():
        by_call.setdefault(call, []).append(rank)
    absent = sorted(set(range(max([*worlds, *(rank + 1 for rank in calls)], default=0))) - set(calls))
    if len(by_call) == 1 and len(calls) > 1 and len(absent) == 1:
        return absent[0]
    alone = [those for those in by_call.values() if len(those) == 1]
    if len(by_call) == 2 and len(calls) > 2 and len(alone) == 1:
        return alone[0][0]
    return next((event.rank for event in waited if event.rank is not None), None)


def describe(verdict: LogVerdict) -> str:
    if verdict.line is None:
        return "No failure found."
    lines = [_headline(verdict), textwrap.indent(shorten(verdict.line.text.strip(), MAX_QUOTED), "  | ")]
    if verdict.place:
        lines.append(f"  at: {verdict.place}")
    if verdict.code == "unknown":
        lines.append(
            "  This failure is not in the catalog. It is the first in the log; later ones are usually its consequences."
        )
    else:
        parts = catalog.sections(verdict.code)
        lines += [
            textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
            for name, text in (("what", parts[""]), *((each.lower(), parts.get(each, "")) for each in _LABELS))
            if text
        ]
    if verdict.then:
        ranks = ("" if each.rank is None else f" on rank {each.rank}" for each in verdict.then)
        then = (f"{each.code}{rank} (line {each.line.number})" for each, rank in zip(verdict.then, ranks, strict=True))
        lines.append(f"  then: {'; '.join(then)}")
    if verdict.code != "unknown":
        lines.append(f"\nThe whole page: paceline explain {verdict.code}")
    return "\n".join(lines)


def _headline(verdict: LogVerdict) -> str:
    assert verdict.line is not None
    where = f"{verdict.line.file}:{verdict.line.number}"
    who = "" if verdict.rank is None else f"rank {verdict.rank}"
    if verdict.node:
        who += f"{' on' if who else 'on'} node {verdict.node}"
    others = [rank for rank in verdict.ranks if rank != verdict.rank]
    also = f" (also {rank_names(others)})" if others and who else ""
    return f"[{verdict.code}] {who}{also}{', ' if who else ''}{where}"
