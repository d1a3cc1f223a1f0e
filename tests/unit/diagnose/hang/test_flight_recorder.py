"""Dumps of torch's flight recorder: which operations are pending, and numbers that agree between ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.diagnose.hang import flight_recorder
from paceline.diagnose.hang.flight_recorder import RecordedGroup
from paceline.tools.testing.runner import ranks


def entry(pg_id: int, number: int, **others: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[2, 3]], "is_p2p": False,
        "op_id": number, "output_dtypes": ["Float"], "output_sizes": [[2, 3]], "p2p_seq_id": 0, "pg_id": pg_id,
        "process_group": [str(pg_id), "default_pg"], "profiling_name": "nccl:all_reduce", "retired": True, **others,
    }  # fmt: skip


def dump(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"entries": entries, "pg_status": {}, "version": "2.10"}, separators=(",", ":")).encode()


def test_a_full_dump_has_the_last_number_of_each_group_and_the_pending_operations() -> None:
    entries = [entry(0, number) for number in range(1, 1500)]
    entries[3]["pg_id"], entries[3]["process_group"] = 4, ["7", "mesh_shard"]
    sends = [entry(0, 1499, is_p2p=True, p2p_seq_id=6, profiling_name="nccl:send 0->1", retired=False)]
    found = flight_recorder.read_dump(dump(*entries, entry(0, 1500, retired=False), *sends))
    assert found.groups == {4: RecordedGroup("7", 4, 0), 0: RecordedGroup("0", 1500, 0)}
    assert [(each["name"], each["number"], each["p2p"]) for each in found.pending] == [
        ("all_reduce", 1500, False), ("send 0->1", 6, True),
    ]  # fmt: skip
    assert found.pending[0]["sizes"] == [[2, 3]]


def test_a_dump_without_entries_is_empty() -> None:
    assert flight_recorder.read_dump(dump()) == ({}, [])
    assert flight_recorder.read_counts(b'{"version": "2.10"}') == {}


def test_only_the_oldest_pending_operations_are_described() -> None:
    found = flight_recorder.read_dump(dump(*(entry(0, number, retired=False) for number in range(1, 100))))
    assert [each["number"] for each in found.pending] == list(range(1, 9))


@ranks(2)
def test_numbers_of_collectives_agree_between_ranks_that_send_and_receive() -> None:
    """gloo counts sends and receives too, and has no entries for them."""
    recorder = torch._C._distributed_c10d._dump_fr_trace_json
    value, rank = torch.ones(3), torch_dist.get_rank()
    before = flight_recorder.read_dump(recorder(True, True)).groups
    pg_id = max(before)  # others are of the process that this one was forked from
    torch_dist.all_reduce(value)
    for _ in range(3):
        torch_dist.send(value, 1) if rank == 0 else torch_dist.recv(value, 0)
    if rank == 1:
        torch_dist.send(value, 0)
    else:
        torch_dist.recv(value, 1)
        torch_dist.send(value, 1)
    if rank == 1:
        torch_dist.recv(value, 0)
    work = torch_dist.broadcast(value, 0, async_op=True)
    work.wait()
    group = flight_recorder.read_dump(recorder(True, True)).groups[pg_id]
    assert (group.number, group.name) == (before[pg_id].number + 2, "0")
    deadline = time.monotonic() + 20
    while (counts := flight_recorder.read_counts(recorder(False, True))[pg_id])[1] < counts[0]:
        assert time.monotonic() < deadline  # the thread of gloo retires an operation after `wait` has returned
    assert counts[0] - group.uncounted == group.number
