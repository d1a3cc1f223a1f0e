"""Collects what can be read about the ranks of this node from outside: heartbeats, pages, process states, stacks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from paceline.diagnose import stacks
from paceline.diagnose.evidence import RankEvidence, WorkerEvidence
from paceline.diagnose.stacks import ProcessStacks
from paceline.run import heartbeat, rank_page
from paceline.run.folder import RunFolder
from paceline.run.rank_page import RankPage

_WORKERS = 16  # children per rank whose stacks are read
_SILENT = 1.0  # seconds; the page of a rank is at most 0.25 s old


def collect(logs: RunFolder, pids: Mapping[int, int], node: int) -> list[RankEvidence]:
    """Evidence about ranks, by their pids. Takes as long as py-spy: 0.1 s for four ranks on an idle machine, and never
    longer than 6 s."""
    workers = {rank: stacks.children_of(pid)[:_WORKERS] for rank, pid in pids.items()}
    states = {pid: stacks.state_of(pid) for pid in (*pids.values(), *chain.from_iterable(workers.values()))}
    alive = [pid for pid, state in states.items() if state != "exited"]
    found = stacks.read_stacks(alive, {pid: logs.stack(rank) for rank, pid in pids.items()})
    # Afterwards: while it was asked for its stack, a rank on a machine under load may have written its page at last.
    beats, pages, now = heartbeat.read(logs), rank_page.read_pages(logs), time.monotonic()
    evidence = []
    for rank, pid in sorted(pids.items()):
        stack, beat = found.get(pid, ProcessStacks(missing="it has exited")), beats.get(rank)
        values = {
            "rank": rank,
            "node": node,
            "pid": pid,
            "state": states[pid],
            "phase": "" if beat is None else beat.phase,
            "step": None if beat is None else beat.trained,
            "stack": stack.main,
            "workers": [
                vars(WorkerEvidence(child, states[child], found.get(child, ProcessStacks()).main))
                for child in workers[rank]
            ],
            **_from_page(pages.get(rank), pid, stack, now),
        }
        if states[pid] == "exited":
            values["silent"] = 0.0
        evidence.append(RankEvidence.from_json(values))
    return evidence


def _from_page(page: RankPage | None, pid: int, stack: ProcessStacks, now: float) -> dict[str, Any]:
    # A page may be of a rank before a restart, or of one that has replaced itself by another program.
    if page is None or page.pid != pid or stack.missing == stacks.NOT_PYTHON:
        page, silent, unread = RankPage(), 0.0, "its collectives: it has no thread that counts them"
    else:
        silent, unread = max(0.0, now - page.time), page.missing
    return {
        "groups": page.groups,
        "pending": page.pending,
        "place": page.place,
        "ended": page.ended,
        "silent": silent,
        "gil_holder": stack.gil_holder if silent > _SILENT else (),
        "missing": "; ".join(filter(None, (f"its stack: {stack.missing}" if stack.missing else "", unread))),
    }


def remove_files(logs: RunFolder, rank: int) -> None:
    """After the end of a rank: what it wrote to be found while it ran."""
    for path in (logs.page(rank), logs.stack(rank)):
        with suppress(OSError):
            path.unlink()
