"""Reads torch's flight recorder, which numbers and describes the operations of every process group of a rank.

Numbers of a group's collectives are the same on all of its ranks. On gloo, `op_id` and the counts of `pg_status` also
count sends and receives, which differ between ranks, and of which there are no entries. `state` stays "scheduled" on
gloo; `retired` is right on every backend. Groups go by the order of their creation in this process (`pg_id`), which no
other rank knows; entries have their name.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_PG_ID = re.compile(rb'"pg_id":(\d+)')
_PENDING = 8  # operations per group that are described, the oldest ones


class RecordedGroup(NamedTuple):
    name: str
    number: int  # of its last collective
    uncounted: int  # what `pg_status` counts more than that: sends and receives


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
