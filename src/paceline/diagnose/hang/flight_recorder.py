"""What torch's flight recorder tells about the collectives of this process. Nothing is added to a collective.

It numbers and describes the operations of every process group. Numbers of a group's collectives are the same on all of
its ranks. On gloo, `op_id` and the counts of `pg_status` also count sends and receives, which differ between ranks, and
of which there are no entries. `state` stays "scheduled" on gloo; `retired` is right on every backend. Groups go by the
order of their creation in this process (`pg_id`), which no other rank knows; entries have their name.

Nothing is imported: torch may never be imported by the rank's script, or be half imported now.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from paceline.diagnose.hang.stack_place import is_any_thread_in
from paceline.run.heartbeat import pack_ranks

_RARE = 20  # a full dump, of up to 50 ms, takes at most this fraction of the time
# Functions of torch._C._distributed_c10d for gloo and NCCL. A group may have both backends, which count for themselves.
_RECORDERS = {"_dump_fr_trace_json": "", "_dump_nccl_trace_json": " (NCCL)"}
# While the flight recorder is locked, no fork: the process would inherit the lock and hang in its collectives.
_dumping = threading.Lock()
_may_fork = threading.local()
_PG_ID = re.compile(rb'"pg_id":(\d+)')
_PENDING = 8  # operations per group that are described, the oldest ones


class ProcessGroups:
    """The process groups of this rank."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[str, list[list[int]]]] = {}  # by name: label and ranks
        self._recorded: dict[tuple[str, int], RecordedGroup] = {}  # by recorder and pg_id, at the last dump
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}
        self._numbers: dict[str, int] = {}  # sequence numbers of groups that no recorder knows
        self._former: dict[str, frozenset[tuple[str, int]]] = {}  # by name: keys of destroyed groups
        self._dumped: set[tuple[str, int]] = set()  # keys of groups whose last number is that of the last dump
        self._next_dump = 0.0
        self.membership: tuple[int, ...] = ()
        self.operations = 0
        self.pending: list[dict[str, Any]] = []
        self.is_pending_known = False
        self.source = self.missing = ""

    def update(self, now: float) -> None:
        world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
        if world is None or not (world.pg_names or self._members) or self._is_creating_group():
            return
        # Not a reference to any group unless they have changed: the last one to be dropped destroys the group, and
        # that must not happen in this thread.
        membership = tuple(map(id, world.pg_names))
        have_changed = membership != self.membership
        if have_changed:
            self._members = dict(_members(world))
            self.membership = membership
        recorders = flight_recorders()
        self.source = "flight recorder" if recorders else "sequence numbers"
        if not recorders:
            self.missing = f"names of pending operations: this torch has no {next(iter(_RECORDERS))}"
        self._counts = {
            (recorder, group): counts
            for recorder, dump in recorders.items()
            for group, counts in read_counts(dump(False, True)).items()
        }
        if have_changed:  # after the counts: a group without operations now had none then
            self._former = dict.fromkeys(_unused(world), frozenset(self._counts))
        if self._counts.keys() - self._recorded.keys():
            self.dump(now)
        known = {self._recorded[key].name for key in self._counts if key in self._recorded}
        self._numbers = dict(_sequence_numbers(world, known)) if self._members.keys() - known else {}
        self.operations = sum(map(sum, self._counts.values())) + sum(self._numbers.values())

    def dump(self, now: float) -> None:
        """Learn the names of groups, and pending operations."""
        if now < self._next_dump or self._is_creating_group():
            return
        began = time.thread_time()  # not of the clock: other processes may keep this one from running
        pending, dumped = [], set()
        for recorder, dump in flight_recorders().items():
            with _dumping:
                text = dump(True, False)
            found = read_dump(text)
            backend = _RECORDERS[recorder]
            pending += [{**each, "group": each["group"] + backend} for each in found.pending]
            for group, each in found.groups.items():
                dumped.add((recorder, group))
                self._recorded[recorder, group] = each._replace(backend=backend)
        self._next_dump = now + _RARE * (time.thread_time() - began)
        self.pending, self._dumped, self.is_pending_known = pending, dumped, True

    def _is_creating_group(self) -> bool:
        """The recorder keeps the groups in maps, to which it adds one then; its functions that dump them take no lock,
        and could crash."""
        return is_any_thread_in("_new_process_group_helper")

    def forget_pending(self) -> None:
        """The counters have changed."""
        self.pending, self._dumped, self.is_pending_known = [], set(), False

    def to_json(self) -> list[dict[str, Any]]:
        numbers = {(name, ""): (number, number) for name, number in self._numbers.items() if not flight_recorders()}
        # A name is used again after destroy_process_group: the higher id is the present group.
        for key in sorted(self._counts.keys() & self._recorded.keys(), key=lambda key: key[1]):
            (entered, left), recorded = self._counts[key], self._recorded[key]
            if key in self._former.get(recorded.name, ()):
                continue
            if key in self._dumped:
                group = recorded.name + recorded.backend
                waiting = [each["number"] for each in self.pending if each["group"] == group and not each["p2p"]]
                entered, left = recorded.number, min(waiting, default=recorded.number + 1) - 1
            else:  # too high by what was sent and received since the last collective
                entered, left = entered - recorded.uncounted, max(0, left - recorded.uncounted)
            numbers[recorded.name, recorded.backend] = (entered, left)
        backends = {backend for _, backend in numbers}
        return [
            {"name": name + backend, "label": label, "ranks": ranks, "entered": entered, "left": left}
            for name, (label, ranks) in self._members.items()
            for backend in sorted({"", *backends})
            for entered, left in [numbers.get((name, backend), (0, 0))]
            if entered or not backend
        ]


def flight_recorders() -> dict[str, Callable[[bool, bool], bytes]]:
    """Functions that dump a flight recorder. Arguments: with entries, and only those that are active."""
    module = sys.modules.get("torch._C._distributed_c10d")
    return {name: getattr(module, name) for name in _RECORDERS if hasattr(module, name)}


def _members(world: Any) -> Iterator[tuple[str, tuple[str, list[list[int]]]]]:
    default = sys.modules["torch.distributed.distributed_c10d"].GroupMember.WORLD
    for group, name in list(world.pg_names.items()):
        label = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
        label = "" if group is default else "unnamed" if label in ("", "undefined") else label
        yield name, (label, pack_ranks(sorted(world.pg_group_ranks.get(group, ()))))


def _sequence_numbers(world: Any, known: set[str]) -> Iterator[tuple[str, int]]:
    for group, name in list(world.pg_names.items()):
        if name not in known:
            with suppress(RuntimeError):  # a backend without them
                yield name, group._get_sequence_number_for_group()


def _unused(world: Any) -> Iterator[str]:
    """Names of groups that have done nothing yet. The recorder still has the destroyed groups of the same names, also
    those of a process that this one was forked from."""
    for group, name in list(world.pg_names.items()):
        with suppress(RuntimeError):  # a backend without sequence numbers
            if not any(group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types):
                yield name


def _before_fork() -> None:
    _may_fork.locked = _dumping.acquire(timeout=1.0)


def _after_fork() -> None:
    if getattr(_may_fork, "locked", False):
        _dumping.release()


def allow_forks() -> None:
    """Call once, before the recorder is read in a thread."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class RecordedGroup(NamedTuple):
    name: str
    number: int  # of its last collective
    uncounted: int  # what `pg_status` counts more than that: sends and receives
    backend: str = ""  # behind the name


class RecorderDump(NamedTuple):
    groups: dict[int, RecordedGroup]  # by pg_id
    pending: list[dict[str, Any]]  # Operation (evidence.py) as JSON, oldest first


def read_counts(dump: bytes) -> dict[int, tuple[int, int]]:
    """By pg_id: the counts of operations that this rank has entered, and left."""
    status = json.loads(dump).get("pg_status", {})
    return {
        int(group): (_count(counts["last_enqueued_collective"]), _count(counts["last_completed_collective"]))
        for group, counts in status.items()
    }


def _count(text: str) -> int:
    return max(0, int(text))  # -1: none


def read_dump(dump: bytes) -> RecorderDump:
    """Groups and pending operations of a full dump."""
    groups: dict[int, RecordedGroup] = {}
    pending: list[dict[str, Any]] = []
    described: dict[int, int] = {}
    for entry in _entries(dump):
        group = int(entry["pg_id"])
        if not entry["is_p2p"]:
            number = int(entry["collective_seq_id"])
            is_gloo = entry["profiling_name"].startswith("gloo:")
            groups[group] = RecordedGroup(
                entry["process_group"][0], number, int(entry["op_id"]) - number if is_gloo else 0
            )
        if not entry["retired"] and described.setdefault(group, 0) < _PENDING:
            described[group] += 1
            pending.append(_operation(entry))
    return RecorderDump(groups, pending)


def _entries(dump: bytes) -> list[dict[str, Any]]:
    """Of up to 2,000 entries only those that tell something: pending ones, and the last collective of each group. To
    parse all of them would hold the GIL for 100 ms. An entry contains lists, but no object."""
    _, _, text = dump.partition(b'"entries":[{')
    texts = text.partition(b"}]")[0].split(b"},{") if text else []
    last: dict[bytes, int] = {}
    for place, each in enumerate(texts):
        if b'"is_p2p":false' in each and (found := _PG_ID.search(each)):
            last[found[1]] = place
    wanted = set(last.values())
    return [
        json.loads(b"{" + each + b"}")
        for place, each in enumerate(texts)
        if place in wanted or b'"retired":false' in each
    ]


def _operation(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "group": entry["process_group"][0],
        "number": int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
        "name": entry["profiling_name"].partition(":")[2],  # "nccl:all_reduce", "nccl:send 0->1"
        "sizes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "p2p": bool(entry["is_p2p"]),
    }
