"""Reports of hangs: on screen, in the logs and in the ledger.

`RunFolder.hang` holds the last report, with the evidence of every rank; `earlier` in it are those before, without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.diagnose import stacks
from paceline.diagnose.evidence import Hang, RankEvidence, WorkerEvidence
from paceline.diagnose.hang import find_hang
from paceline.diagnose.patience import EXIT, LASTING, Standstill
from paceline.diagnose.stacks import ProcessStacks
from paceline.launcher.local.rank_logs import RankLogs
from paceline.launcher.local.start import AgentObserver, LocalStart
from paceline.run import heartbeat, rank_page, regular_files
from paceline.run.folder import RunFolder, short
from paceline.run.ledger import Ledger
from paceline.run.rank_page import RankPage
from paceline.text import format_duration

_KEPT = 20  # earlier reports
# Ranks that made different calls, have ended, or are idle at their end will never continue. Others may only be slow:
# their run is not stopped before that lasts.
_FINAL = ("mismatch", "order", "left", "exit")
Message = dict[str, Any]


class HangPolicy(AgentObserver):
    """Reports hangs of the ranks of a single node, and stops them if `--on-hang` says so."""

    def __init__(self, start: LocalStart) -> None:
        self._start = start
        self._reported: Standstill | None = None

    def standstill(self, found: Standstill, ranks: Sequence[RankEvidence]) -> None:
        spec, generation = self._start.spec, self._start.generation
        if self.hang is not None or (self._reported is not None and spec.on_hang == "report"):
            return
        self._reported = self._reported or found
        hang = judge(ranks, found)
        action = next_action(spec, generation - spec.prior_starts, hang, found)
        self._tell(hang_message(hang, found, ranks, generation, action))
        if action.stops:
            self.hang = hang

    def continued(self, seconds: float) -> None:
        if self._reported is not None:
            self._tell(continued_message(seconds, self._reported))
            self._reported = None

    def order(self) -> int | None:
        return None if self.hang is None else 0

    def _tell(self, message: Message) -> None:
        show(message, self._start.logs)
        record(message, self._start.logs)


def judge(ranks: Sequence[RankEvidence], found: Standstill) -> Hang:
    """An error in the diagnosis must not end a run that may continue."""
    try:
        return find_hang(ranks, found.seconds, at_exit=found.phase == EXIT)
    except Exception as error:
        return Hang("unknown", (), f"ranks make no progress; the cause was not found ({type(error).__name__}: {error})")


class NextAction(NamedTuple):
    text: str
    stops: bool = True  # the ranks
    ends_run: bool = True


def next_action(spec: LaunchSpec, restarts: int, hang: Hang, found: Standstill) -> NextAction:
    """What `--on-hang` leads to, after so many restarts."""
    if spec.on_hang == "report":
        return NextAction("still waiting (--on-hang restart or stop would stop the ranks)", stops=False, ends_run=False)
    if not found.lasts and hang.kind not in _FINAL:
        lasting = format_duration(LASTING * found.limit)
        return NextAction(f"still waiting, for up to {lasting} (--on-hang {spec.on_hang})", stops=False, ends_run=False)
    if spec.on_hang == "stop":
        return NextAction("stopping the run (--on-hang stop)")
    if restarts < spec.max_restarts:
        return NextAction("stopping the ranks for a restart (--on-hang restart)", ends_run=False)
    why = "restarts are used up" if spec.max_restarts else "--max-restarts is 0"
    return NextAction(f"stopping the run (--on-hang restart, but {why})")


def hang_message(
    hang: Hang, found: Standstill, ranks: Sequence[RankEvidence], generation: int, action: NextAction
) -> Message:
    """The report: `text` for the screen, and what to record. A run that ends shows the whole report at its end."""
    what = hang.text.partition("\n")[0] if action.ends_run else hang.text.rstrip()
    limit = f"limit {found.limit:.1f} s in {found.phase or 'a script without a Trainer'}: {found.why}"
    text = f"{what}\n  no progress for {found.seconds:.1f} s ({limit})\n  {action.text}"
    values = {
        "time": round(time.time(), 3),
        "generation": generation,
        "kind": hang.kind,
        "ranks": list(hang.ranks),
        "text": hang.text,
        "operation": None if hang.operation is None else asdict(hang.operation),
        "lines": {str(rank): line for rank, line in hang.lines.items()},
        "phase": found.phase,
        "seconds": round(found.seconds, 3),
        "limit": round(found.limit, 3),
        "why": found.why,
        "lasts": found.lasts,
        "evidence": [each.to_json() for each in ranks],
    }
    return {"kind": "hang", "text": text, "record": values}


def continued_message(seconds: float, reported: Standstill) -> Message:
    text = f"ranks make progress again, after {seconds:.1f} s"
    since_report = max(0.0, seconds - reported.seconds)
    return {"kind": "continued", "text": text, "record": {"seconds": round(since_report, 3)}}


def show(message: Message, logs: RankLogs | None) -> None:
    """On a line of its own: a progress bar may be on the last one."""
    if message["kind"] == "hang":
        where = f"\n  stacks of all ranks: {short(logs.folder.hang)}" if logs is not None and logs.run else ""
        log.warning(f"\n{message['text']}{where}")
    else:
        log.info(f"\n{message['text']}")


def record(message: Message, logs: RankLogs) -> None:
    """In the logs and in the ledger. Errors are ignored: it was shown."""
    values: Mapping[str, Any] = message["record"]
    if message["kind"] == "hang":
        with suppress(OSError):
            content = {**values, "earlier": _earlier(logs.folder)}
            regular_files.replace(logs.folder.hang, json.dumps(content).encode())
        if values["lasts"]:  # the ledger has it
            return
        values = {name: values[name] for name in ("kind", "ranks", "seconds")}
    Ledger(logs.run).note(message["kind"], **values)


def _earlier(folder: RunFolder) -> list[Any]:
    """The reports so far, newest first."""
    try:
        last = json.loads(regular_files.read_bytes(folder.hang))
        return [{name: last[name] for name in last if name not in ("evidence", "earlier")}, *last["earlier"]][:_KEPT]
    except (OSError, ValueError, TypeError, KeyError):
        return []


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
