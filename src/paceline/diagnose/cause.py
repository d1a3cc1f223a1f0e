"""Why a run ended: of all ranks that are gone, the one that went first, and in which way.

When one rank of a world ends, all others lose their connection to it, each with a traceback of its own. Those are
consequences. What a rank tells of itself (its failure record, or the last lines of its log) and its exit status say
which of the ends were its own reason: an exception, a signal, an exit. Of these the earliest counts. Waiting in vain
comes next, and a lost connection is a cause only where nothing else happened: then it was the network.

Each kind of cause has an exit status (`STATUSES`), so that a script can tell them apart.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from paceline.diagnose import signatures

if TYPE_CHECKING:
    from paceline.run.failures import FailureRecord

Kind = Literal[
    "exception", "gpu-memory", "oom-killer", "signal", "lost-connection", "port-in-use", "timeout",
    "version-mismatch", "early-exit", "exit", "node-lost",
]  # fmt: skip

# What the shell gets. A signal is 128 + its number, and a rank's own sys.exit(n) is n.
STATUSES: Mapping[Kind, int] = MappingProxyType(
    {
        "exception": 1,
        "gpu-memory": 70,
        "oom-killer": 71,
        "lost-connection": 72,
        "port-in-use": 73,
        "timeout": 74,
        "version-mismatch": 75,
        "early-exit": 76,
        "node-lost": 78,
    }
)

FIXES: Mapping[Kind, str] = MappingProxyType(
    {
        "exception": "",  # its own words say it
        "gpu-memory": "use a smaller micro_batch (accumulate keeps the batch), bf16, or a layout that shards the model",
        "oom-killer": "the machine's memory, not the GPU's, was full: use fewer loader workers, fewer ranks on a "
        "machine, less data held in memory, or raise the memory limit of the job",
        "signal": "if nobody sent it, look for a limit of the scheduler or the container, and into the rank's log",
        "lost-connection": "no rank died, so look at the network between these addresses: cables, firewall, MTU",
        "port-in-use": "choose another port, or leave it out: a free one is found; is an old run still there?",
        "timeout": "find out in its log what the rank that never came was doing; if it is only slow, raise timeout",
        "version-mismatch": "install the same versions on every machine",
        "early-exit": "ranks must do the same number of steps: look for a return, a break or data that ends sooner",
        "exit": "the script, or a library in it, ended the process on purpose; the rank's log may say why",
        "node-lost": "look at that machine: was it switched off, preempted, or cut off from the network?",
    }
)
_FIXES_OF_SIGNALS = {
    "SIGSEGV": "compiled code crashed: the log's last lines name it; look for a library built for another torch",
    "SIGBUS": "memory behind a file or /dev/shm was gone: is a disk or /dev/shm full?",
    "SIGILL": "compiled code is for another processor: install a build for this one",
}

# The launcher sees that a rank is gone when it next looks; what a rank writes itself has its exact time.
_NOTICED = 0.1
_SHELL_SIGNALS = {128 + number for number in (2, 6, 9, 11, 15)}  # a shell's word for a signal
_TO_END = {signal.SIGTERM, signal.SIGINT}  # what launchers end ranks with
_NAMED = 8


@dataclass(frozen=True)
class RankExit:
    """How one rank ended, and what it left."""

    rank: int
    node: int
    code: int | None  # exit status, negative for a signal; None: it still ran when the launcher ended it
    time: float  # in seconds, on one clock for all: that of its record where it left one, else when it was noticed
    record: FailureRecord | None = None
    phase: str = ""
    step: int | None = None
    tail: str = ""  # the last lines of its log

    @property
    def text(self) -> str:
        """Its own words, as far as there are any."""
        return self.record.text if self.record else self.tail


@dataclass(frozen=True)
class Cause:
    kind: Kind
    rank: int | None
    node: int | None
    what: str  # a sentence
    text: str  # the traceback or last lines, if any
    status: int  # for the shell
    fix: str


@dataclass(frozen=True)
class _Ends:
    """All ranks, and how each of them ended."""

    ends: Sequence[RankExit]
    kinds: Mapping[int, Kind | None]  # by rank; None: it ended well, or the launcher ended it
    several_nodes: bool

    def of(self, *kinds: Kind | None) -> list[RankExit]:
        return sorted((end for end in self.ends if self.kinds[end.rank] in kinds), key=lambda end: end.time)

    @property
    def failed(self) -> list[RankExit]:
        return [end for end in self.ends if self.kinds[end.rank] is not None]

    @property
    def own(self) -> list[RankExit]:
        """Those that ended for a reason of their own, the first of them first."""
        missed = self.of("lost-connection", "timeout")
        own = [end for end in self.failed if end not in missed and not _was_told_to_end(end, self.failed)]
        first_hand = [end for end in own if _repeated(end) is None]
        return sorted(first_hand or own, key=_earliest)

    @property
    def silent(self) -> list[RankExit]:
        """Those that still ran, and had said nothing."""
        return [end for end in self.of(None) if end.code is None]

    def name(self, end: RankExit) -> str:
        return f"rank {end.rank} (node {end.node})" if self.several_nodes else f"rank {end.rank}"

    def names(self, ends: Iterable[RankExit]) -> str:
        found = sorted(ends, key=lambda end: end.rank)
        if len(found) == 1:
            return self.name(found[0])
        shown = [f"{end.rank} (node {end.node})" if self.several_nodes else str(end.rank) for end in found[:_NAMED]]
        last = f"{len(found) - _NAMED} others" if len(found) > _NAMED else shown.pop()
        return f"ranks {', '.join(shown)} and {last}"


def find_cause(
    ends: Sequence[RankExit],
    *,
    oom_killed: Collection[int] = (),
    lost_nodes: Mapping[int, str] = MappingProxyType({}),
    several_nodes: bool = False,
) -> Cause:
    """The cause of a failed run. `oom_killed` are ranks for which there is evidence that the kernel killed them,
    `lost_nodes` the machines whose launcher is gone, with its last words."""
    found = _Ends(ends, {end.rank: _kind(end, oom_killed) for end in ends}, several_nodes)
    if lost_nodes:
        return _lost_node(lost_nodes)
    if early := _early_exit(found):
        return early
    if found.own:
        return _own_reason(found, found.own[0])
    if found.of("timeout"):
        return _timeout(found)
    if found.of("lost-connection"):
        return _lost_connection(found)
    return _nothing_known(found)


def _kind(end: RankExit, oom_killed: Collection[int]) -> Kind | None:
    """How this rank ended, seen by itself."""
    if end.record is None and not end.code:
        return None
    if end.rank in oom_killed:
        return "oom-killer"
    number = _signal(end)
    if number and number != signal.SIGABRT:
        return "signal"  # the words in its log are older
    if said := signatures.classify(end.text, _code(end)):
        return said
    if number:
        return "signal"
    asked_for = end.record is not None and " called sys.exit(" in end.record.text.partition("\n")[0]
    raised = end.record is not None or signatures.has_traceback(end.tail)
    return "exception" if raised and not asked_for else "exit"


def _code(end: RankExit) -> str:
    parts = end.record.error if end.record else None
    return f"{parts['family']}.{parts['name']}" if parts else ""


def _signal(end: RankExit) -> int:
    if end.code is not None and end.code < 0:
        return -end.code
    if end.record is None and end.code in _SHELL_SIGNALS:
        return end.code - 128
    return 0


def _earliest(end: RankExit) -> float:
    """When it may have ended."""
    return end.time if end.record else end.time - _NOTICED


def _was_told_to_end(end: RankExit, failed: Sequence[RankExit]) -> bool:
    """Whether it may have ended because the launcher told it to, after another rank had failed."""
    ended_by_launcher = end.code is None or _signal(end) in _TO_END or end.code in (130, 143)
    others = [other.time for other in failed if other.rank != end.rank and other.code is not None]
    return ended_by_launcher and bool(others) and min(others) + _NOTICED < end.time


def _repeated(end: RankExit) -> int | None:
    """The other rank whose error this one repeats, if so."""
    rank = signatures.blamed_rank(end.text) if _code(end) else None
    return None if rank == end.rank else rank


def _early_exit(found: _Ends) -> Cause | None:
    """A rank that ended well, though others still needed it: they miss it before anything else happens."""
    missing = found.of("lost-connection", "timeout")
    if not missing or (found.own and _earliest(found.own[0]) <= missing[0].time):
        return None
    gone = [end for end in found.of(None) if end.code == 0]
    early = [end for end in gone if end.phase != "done" or _earliest(end) <= missing[0].time]
    if not early:
        return None
    first = min(early, key=_earliest)
    what = f"{found.name(first)} ended with exit status 0{_where(first)}, while others still needed it"
    return _cause("early-exit", first, what + _consequences(found), first)


def _own_reason(found: _Ends, end: RankExit) -> Cause:
    """The cause is this end; or the one that it tells of, whose own words did not come in time."""
    told = next((other for other in found.ends if other.rank == _repeated(end)), None)
    cause = _first_hand(found, end)
    if told is None:
        return cause
    what = f"{found.name(told)} failed{_where(told)}, as {found.name(end)} tells"
    return replace(cause, rank=told.rank, node=told.node, what=what)


def _first_hand(found: _Ends, end: RankExit) -> Cause:
    kind = found.kinds[end.rank]
    assert kind is not None
    number = _signal(end)
    did = {
        "exception": _raised(end),
        "gpu-memory": "ran out of memory" if "(cpu)" in end.text else "ran out of GPU memory",
        "oom-killer": "was killed by the kernel's OOM killer",
        "signal": f"was ended by {_signal_name(number)}",
        "port-in-use": "found its port in use",
        "version-mismatch": "found other versions than its own",
        "exit": f"ended with exit status {end.code}",
    }[kind]
    what = f"{found.name(end)} {did}{_where(end)}{_consequences(found)}"
    if kind == "exit":
        return _cause(kind, end, what, end, status=end.code or 1)
    if kind == "signal":
        fix = _FIXES_OF_SIGNALS.get(_signal_name(number), FIXES["signal"])
        return _cause(kind, end, what, end, status=128 + number, fix=fix)
    return _cause(kind, end, what, end)


def _raised(end: RankExit) -> str:
    if code := _code(end):
        return f"stopped with {code}"
    name = signatures.exception_name(end.text)
    return f"raised {name}" if name else "failed"


def _timeout(found: _Ends) -> Cause:
    waited = found.of("timeout", "lost-connection")
    what = f"{found.names(waited)} waited for the others until the time was up"
    suspects = found.silent
    if suspects:
        what += f"; {found.names(suspects)} never came, and still ran{_where(suspects[0])}"
    return _cause("timeout", (suspects or waited)[0], what, found.of("timeout")[0])


def _lost_connection(found: _Ends) -> Cause:
    lost, silent = found.of("lost-connection"), found.silent
    peers = sorted({peer for end in lost for peer in signatures.peers(end.text)})
    at = f" (at {', '.join(peers[:_NAMED])})" if peers else ""
    whom = f" to {found.names(silent)}, which still ran" if silent else " to each other"
    what = f"{found.names(lost)} lost the connection{whom}{at}{_where(lost[0])}, and no rank had ended before"
    return _cause("lost-connection", silent[0] if len(silent) == 1 else lost[0], what, lost[0])


def _lost_node(lost_nodes: Mapping[int, str]) -> Cause:
    node = next(iter(lost_nodes))  # the first that was missed
    others = [str(other) for other in sorted(lost_nodes) if other != node]
    what = f"node {node} was lost" + (f", and then nodes {', '.join(others)}" if others else "")
    words = lost_nodes[node].strip()
    return Cause("node-lost", None, node, what, words, STATUSES["node-lost"], FIXES["node-lost"])


def _nothing_known(found: _Ends) -> Cause:
    """Nobody failed: the launcher ended ranks that it took for failed, or their ends came to light too late."""
    end = min(found.failed or found.silent or found.ends, key=lambda end: end.time)
    return _cause("exit", end, f"{found.name(end)} was ended by the launcher{_where(end)}", end, status=1)


def _cause(
    kind: Kind, end: RankExit, what: str, witness: RankExit, *, status: int | None = None, fix: str = ""
) -> Cause:
    """`witness` is the rank whose words are shown. What an error with a code advises is better than general advice."""
    text = witness.text
    if parts := witness.record.error if witness.record else None:
        text = f"[{_code(witness)}] {parts['what']}" + (f"\n  why: {parts['why']}" if parts["why"] else "")
        fix = parts["fix"] or fix
    status = STATUSES[kind] if status is None else status
    return Cause(kind, end.rank, end.node, what, text.rstrip(), status, fix or FIXES[kind])


def _consequences(found: _Ends) -> str:
    lost = found.of("lost-connection")
    return f"; then {found.names(lost)} lost the connection to it" if lost else ""


def _where(end: RankExit) -> str:
    """What it was doing, as far as its progress page tells."""
    doing = {
        "start": "at the start",
        "rendezvous": "while the ranks met",
        "load": "while loading",
        "first step": "in its first step",
        "saving": "while saving",
        "evaluating": "while evaluating",
        "done": "after its training",
    }.get(end.phase, "")
    step = f"in step {end.step}" if end.step is not None and end.phase not in ("first step", "done") else ""
    return "".join(f" {words}" for words in (", ".join(filter(None, (step, doing))),) if words)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
