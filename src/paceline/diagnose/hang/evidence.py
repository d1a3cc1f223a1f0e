"""What is known about a rank that makes no progress: read from outside by its launcher, and judged by hang.py.

All of it is plain data, which launchers send to the coordinator of several nodes as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

ProcessState = Literal["running", "stopped", "disk", "exited"]  # disk: blocked in the kernel (state D)


class StackFrame(NamedTuple):
    """A frame of a Python stack."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Operation:
    """A collective, or a send or receive, that a rank has entered and not left."""

    group: str  # name of the process group
    number: int  # in its group, counted from 1
    name: str  # all_reduce
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    p2p: bool = False


@dataclass(frozen=True)
class GroupProgress:
    """A process group, as one of its ranks sees it."""

    name: str
    label: str  # "shard", or "" for the default group
    ranks: tuple[int, ...]
    entered: int  # number of the last operation that this rank has entered
    left: int  # and of the last one that it has left


@dataclass(frozen=True)
class WorkerEvidence:
    """A child process of a rank, such as a worker of its DataLoader."""

    pid: int
    state: ProcessState
    stack: tuple[StackFrame, ...] = ()  # of its main thread, innermost first


@dataclass(frozen=True)
class RankEvidence:
    """One rank at the time of a report."""

    rank: int
    node: int = 0
    pid: int = 0
    state: ProcessState = "running"
    phase: str = ""  # of its heartbeat; "" without a Trainer
    step: int | None = None  # in progress, counted from 1
    groups: tuple[GroupProgress, ...] = ()
    pending: tuple[Operation, ...] = ()
    stack: tuple[StackFrame, ...] = ()  # of its main thread, innermost first
    workers: tuple[WorkerEvidence, ...] = ()
    ended: str = ""  # how its code ended, while its process waits or has exited
    silent: float = 0.0  # seconds since its own thread could last write its page: it holds the GIL, or is stopped
    place: str = ""  # of its main thread, as its own thread saw it; for lack of a stack
    gil_holder: tuple[StackFrame, ...] = ()  # of another thread, if it is silent and that thread holds the GIL
    missing: str = ""  # what could not be read, and why

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ranks_from_json(values: object) -> list[RankEvidence]:
    """The opposite of `to_json`, of several ranks. A ValueError if it is something else: a node may send anything."""
    from pydantic import TypeAdapter

    return TypeAdapter(list[RankEvidence]).validate_python(values)


@dataclass(frozen=True)
class Hang:
    """What find_hang concludes. `text` is the report for people; the rest is for tools and tests."""

    kind: str  # missing, left, mismatch, order, stands-still, exit, network, unknown
    ranks: tuple[int, ...]  # to blame; empty if it can't be told
    text: str
    operation: Operation | None = None  # that others wait in
    lines: Mapping[int, str] = field(default_factory=dict)  # by rank: "read_image() at data.py:88"
