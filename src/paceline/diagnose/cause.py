"""Why a run failed: which rank failed first, and how.

When one rank exits, every other rank loses its connection to it and fails with a traceback of its own. Those are
consequences. The failure record, the log tail and the exit status of each rank tell which of them failed on their own:
with an exception, by a signal, by an exit. The earliest of these is the cause. A timeout comes next. A lost connection
is the cause only if nothing else happened: then it was the network.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.diagnose.exits import (
    EXIT_STATUSES,
    FIXES,
    MISMATCH_FIX,
    POLL_SECONDS,
    SIGNAL_FIXES,
    FailureKind,
    RankExit,
    blamed_rank,
    classify,
    exception_name,
    has_traceback,
    is_mismatch,
    peers,
)
from paceline.diagnose.hang.evidence import Hang
from paceline.run.ledger import RunEnd
from paceline.text import rank_names

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}  # with which launchers stop ranks
_MAX_NAMED = 8


@dataclass(frozen=True)
class Cause:
    kind: FailureKind
    rank: int | None
    node: int | None
    what: str  # a sentence
    text: str  # the traceback or the last lines of the log, if any
    status: int  # exit status of the launch
    fix: str
    seen: Mapping[str, Any] = field(default_factory=dict)  # signal, exception and line, as in a `RunEnd`

    def to_end(self, step: int) -> RunEnd:
        """`step`: the last completed one."""
        told = {name: value for name, value in asdict(self).items() if name not in ("kind", "node", "seen")}
        return RunEnd("failed", cause=self.kind, step=step, **told, **self.seen)


@dataclass(frozen=True)
class _Exits:
    """All ranks, and how each of them exited."""

    exits: Sequence[RankExit]
    kinds: Mapping[int, FailureKind | None]  # by rank; None: it succeeded, or the launcher stopped it
    several_nodes: bool

    def of(self, *kinds: FailureKind | None) -> list[RankExit]:
        return sorted((each for each in self.exits if self.kinds[each.rank] in kinds), key=lambda each: each.time)

    @property
    def failed(self) -> list[RankExit]:
        return [each for each in self.exits if self.kinds[each.rank] is not None]

    @property
    def independent(self) -> list[RankExit]:
        """Failures that are not the consequence of another rank's, earliest first."""
        waiting = self.of("lost-connection", "timeout")
        own = [each for each in self.failed if each not in waiting and not _was_stopped(each, self.failed)]
        first_hand = [each for each in own if _blamed_rank(each) is None]
        return sorted(first_hand or own, key=lambda each: each.earliest)

    @property
    def still_running(self) -> list[RankExit]:
        """Ranks that were running, without an error, when the launcher stopped them."""
        return [each for each in self.of(None) if each.code is None]

    def name(self, rank_exit: RankExit) -> str:
        return self.names([rank_exit])

    def names(self, exits: Iterable[RankExit]) -> str:
        nodes = {each.rank: each.node for each in self.exits} if self.several_nodes else {}
        return rank_names((each.rank for each in exits), nodes)


def find_cause(
    exits: Sequence[RankExit],
    *,
    oom_killed: Collection[int] = (),
    lost_nodes: Mapping[int, str] | None = None,
    several_nodes: bool = False,
) -> Cause:
    """The cause of a failed run. `oom_killed`: ranks with evidence that the kernel's OOM killer killed them;
    `lost_nodes`: nodes whose launcher is gone, with its last output."""
    found = _Exits(exits, {each.rank: _kind(each, oom_killed) for each in exits}, several_nodes)
    if lost_nodes:
        return _lost_node(lost_nodes)
    if early := _early_exit(found):
        return early
    if found.independent:
        return _first_failure(found, found.independent[0])
    if found.of("timeout"):
        return _timeout(found)
    if found.of("lost-connection"):
        return _lost_connection(found)
    return _stopped_by_launcher(found)


def hang_cause(hang: Hang, exits: Sequence[RankExit]) -> Cause:
    """The cause if ranks were stopped because they made no progress."""
    rank = next(iter(hang.ranks), None)
    node = next((each.node for each in exits if each.rank == rank), None)
    return Cause("hang", rank, node, hang.text, "", EXIT_STATUSES["hang"], FIXES["hang"])


def _kind(rank_exit: RankExit, oom_killed: Collection[int]) -> FailureKind | None:
    """How this rank failed, by its own evidence alone."""
    if rank_exit.record is None and not rank_exit.code:
        return None
    if rank_exit.rank in oom_killed:
        return "oom-killer"
    number = rank_exit.signal_number
    if number and number != signal.SIGABRT:
        return "signal"  # its log was written before the signal
    if matched := classify(rank_exit.text, rank_exit.error_code):
        return matched
    if number:
        return "signal"
    first_line = rank_exit.record.text.partition("\n")[0] if rank_exit.record else ""
    raised = rank_exit.record is not None or has_traceback(rank_exit.tail)
    return "exception" if raised and " called sys.exit(" not in first_line else "exit"


def _was_stopped(rank_exit: RankExit, failed: Sequence[RankExit]) -> bool:
    """Whether the launcher may have stopped it, after another rank had failed."""
    by_launcher = rank_exit.code in (None, 130, 143) or rank_exit.signal_number in _STOP_SIGNALS
    others = [other.time for other in failed if other.rank != rank_exit.rank and other.code is not None]
    return by_launcher and bool(others) and min(others) + POLL_SECONDS < rank_exit.time


def _blamed_rank(rank_exit: RankExit) -> int | None:
    """The other rank whose error this one repeats, if any."""
    rank = blamed_rank(rank_exit.text) if rank_exit.error_code else None
    return None if rank == rank_exit.rank else rank


def _early_exit(found: _Exits) -> Cause | None:
    """A rank that exited with status 0 while others still ran: they fail for lack of it before anything else does."""
    waiting = found.of("lost-connection", "timeout")
    if not waiting or (found.independent and found.independent[0].earliest <= waiting[0].time):
        return None
    succeeded = [each for each in found.of(None) if each.code == 0]
    early = [each for each in succeeded if each.phase != "done" or each.earliest <= waiting[0].time]
    if not early:
        return None
    first = min(early, key=lambda each: each.earliest)
    where = f"{first.where}," if first.where else ""
    what = f"{found.name(first)} exited with status 0{where} while other ranks were still running"
    return _cause(found, "early-exit", first, what + _consequences(found), first)


def _first_failure(found: _Exits, rank_exit: RankExit) -> Cause:
    """The cause is this failure; or the one that it reports, if that rank left no evidence in time."""
    cause = _own_failure(found, rank_exit)
    blamed = next((each for each in found.exits if each.rank == _blamed_rank(rank_exit)), None)
    if blamed is None:
        return cause
    what = f"{found.name(blamed)} failed{blamed.where}, as reported by {found.name(rank_exit)}"
    return replace(cause, rank=blamed.rank, node=blamed.node, what=what)


def _own_failure(found: _Exits, rank_exit: RankExit) -> Cause:
    kind = found.kinds[rank_exit.rank]
    assert kind is not None
    did = {
        "exception": _raised(rank_exit),
        "cpu-memory": "ran out of memory",
        "gpu-memory": "ran out of GPU memory",
        "oom-killer": "was killed by the kernel's OOM killer",
        "signal": f"was killed by {rank_exit.signal_name}",
        "port-in-use": "could not bind its port (already in use)",
        "version-mismatch": "found different versions on other ranks",
        "exit": f"exited with status {rank_exit.code}",
    }[kind]
    mismatch = is_mismatch(rank_exit.text)
    if mismatch:
        did = "received data of another collective than it waited for"
    what = f"{found.name(rank_exit)} {did}{rank_exit.where}{_consequences(found)}"
    if kind == "exit":
        return _cause(found, kind, rank_exit, what, rank_exit, status=rank_exit.code or 1)
    if kind == "signal":
        fix = MISMATCH_FIX if mismatch else SIGNAL_FIXES.get(rank_exit.signal_name, "")
        return _cause(found, kind, rank_exit, what, rank_exit, status=128 + rank_exit.signal_number, fix=fix)
    return _cause(found, kind, rank_exit, what, rank_exit, fix=MISMATCH_FIX if mismatch else "")


def _raised(rank_exit: RankExit) -> str:
    if rank_exit.error_code:
        return f"stopped with {rank_exit.error_code}"
    name = exception_name(rank_exit.text)
    return f"raised {name}" if name else "failed"


def _timeout(found: _Exits) -> Cause:
    waited, missing = found.of("timeout", "lost-connection"), found.still_running
    apart = len({each.place for each in waited if each.place}) > 1
    others = "each other, at different lines" if apart and len(waited) == len(found.exits) else "other ranks"
    whom = f"{_running(found, missing)}{missing[0].where}" if missing else others
    what = f"{found.names(waited)} timed out waiting for {whom}"
    fix = MISMATCH_FIX if apart and not missing else ""
    return _cause(found, "timeout", (missing or waited)[0], what, found.of("timeout")[0], fix=fix)


def _lost_connection(found: _Exits) -> Cause:
    lost, running = found.of("lost-connection"), found.still_running
    addresses = sorted({peer for each in lost for peer in peers(each.text)})
    at = f" (at {', '.join(addresses[:_MAX_NAMED])})" if addresses else ""
    whom = _running(found, running) if running else "each other"
    what = f"{found.names(lost)} lost the connection to {whom}{at}{lost[0].where}; no rank had exited before"
    return _cause(found, "lost-connection", running[0] if len(running) == 1 else lost[0], what, lost[0])


def _running(found: _Exits, running: Sequence[RankExit]) -> str:
    return f"{found.names(running)}, which {'is' if len(running) == 1 else 'are'} still running"


def _lost_node(lost_nodes: Mapping[int, str]) -> Cause:
    node = next(iter(lost_nodes))  # the first to be lost
    others = [str(other) for other in sorted(lost_nodes) if other != node]
    what = f"node {node} was lost" + (f", and then nodes {', '.join(others)}" if others else "")
    output = lost_nodes[node].strip()
    return Cause("node-lost", None, node, what, output, EXIT_STATUSES["node-lost"], FIXES["node-lost"])


def _stopped_by_launcher(found: _Exits) -> Cause:
    """No rank failed: the launcher stopped ranks it took for failed, or noticed their exits too late."""
    first = min(found.failed or found.still_running or found.exits, key=lambda each: each.time)
    return _cause(
        found, "exit", first, f"{found.name(first)} was stopped by the launcher{first.where}", first, status=1
    )


def _cause(
    found: _Exits,
    kind: FailureKind,
    blamed: RankExit,
    what: str,
    witness: RankExit,
    *,
    status: int | None = None,
    fix: str = "",
) -> Cause:
    """`witness` is the rank whose text is shown. The fix of a coded error takes precedence over the kind's."""
    text = witness.text.rstrip()
    if error := witness.record.error if witness.record else None:
        text = f"[{witness.error_code}] {error['what']}" + (f"\n  why: {error['why']}" if error["why"] else "")
        fix = error["fix"] or fix
    text += "".join(f"\n  at: {place}" for place in _places(found, witness))
    status = EXIT_STATUSES[kind] if status is None else status
    seen: dict[str, Any] = {"signal": witness.signal_name} if kind == "signal" else {}
    if record := witness.record if witness is blamed or kind not in ("signal", "exit") else None:
        seen |= {"exception": record.exception, "message": record.message, "file": record.file, "line": record.line}
        seen |= {"function": record.function, "code": record.code_line}
    elif kind == "exception":
        seen = {"exception": exception_name(witness.text)}
    return Cause(kind, blamed.rank, blamed.node, what, text.rstrip(), status, fix or FIXES[kind], seen)


def _places(found: _Exits, witness: RankExit) -> list[str]:
    """The lines of the user's code at which ranks failed like this one: one line, or those of different ranks."""
    kind, ranks = found.kinds[witness.rank], dict[str, list[RankExit]]()
    apart = witness.error_code == "world.different-calls"  # the others are at fault as much as this one
    for each in found.exits:
        alike = found.kinds[each.rank] == kind and each.error_code == witness.error_code
        if each.place and (alike or (apart and found.kinds[each.rank] in ("lost-connection", "timeout"))):
            ranks.setdefault(each.place, []).append(each)
    if len(ranks) < 2 or not witness.place:
        return [witness.place] * bool(witness.place)
    return [f"{place} ({found.names(those)})" for place, those in ranks.items()][:_MAX_NAMED]


def _consequences(found: _Exits) -> str:
    lost = found.of("lost-connection")
    return f"; then {found.names(lost)} lost the connection to it" if lost else ""
