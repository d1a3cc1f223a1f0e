"""Watches the ranks of this node for a standstill, in a thread of the launcher.

Four times a second it reads how far each rank has come, from the rank's heartbeat and page. If they come no further for
longer than their phase allows (diagnose/hang/progress_limits.py), it collects evidence and hands it over, unless a rank
has moved meanwhile. It runs between the start of the last rank and the end of the generation: processes are forked only
without it. Reports go to the screen, the logs and the ledger. `RunFolder.hang` holds the last one, with the evidence of
every rank; `earlier` in it are those before, without it.

If this process is stopped (Ctrl-Z), its ranks usually are as well: ProgressLimits counts a second of that at most.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.diagnose.hang import process_stacks
from paceline.diagnose.hang.evidence import Hang, RankEvidence, WorkerEvidence, ranks_from_json
from paceline.diagnose.hang.hang_report import find_hang
from paceline.diagnose.hang.process_stacks import ProcessStacks
from paceline.diagnose.hang.progress_limits import EXIT, LASTING, NoProgress, Observation, ProgressLimits
from paceline.diagnose.hang.stack_place import activity_of
from paceline.launcher.local.start import AgentObserver, LocalStart, RankLogs
from paceline.run import heartbeat, regular_files
from paceline.run.folder import RunFolder, short
from paceline.run.heartbeat import Heartbeat, RankPage
from paceline.run.ledger import Ledger
from paceline.text import format_duration

_TICK = 0.25
_LEAST_CPU = 0.5  # seconds; threads that only wait, for the GIL or to look around, use half of that in a minute
_FOR_NAMES = 2.0  # seconds in which ranks on a busy machine have found out which operations they are in
_KEPT = 20  # earlier reports
# Ranks that made different calls, have ended, or are idle at their end will never continue. Others may only be slow:
# their run is not stopped before that lasts.
_FINAL = ("mismatch", "order", "left", "exit")
Message = dict[str, Any]
_WORKERS = 16  # children per rank whose stacks are read
_SILENT = 1.0  # seconds; the page of a rank is at most 0.25 s old


class HangDetector:
    """`pids`: by rank; `running`: tells which ranks have not exited."""

    def __init__(
        self,
        logs: RunFolder,
        pids: Mapping[int, int],
        running: Callable[[], Collection[int]],
        node: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._logs, self._pids, self._running, self._node = logs, pids, running, node
        self._patience = ProgressLimits()
        self._seen: dict[int, Observation] = {}
        self._moved_at = clock()  # when a rank made progress last
        self._others_ended = False  # ranks of other nodes
        self._postponed: NoProgress | None = None  # a report, until then
        self._postponed_until = 0.0
        self._found: SimpleQueue[Callable[[AgentObserver], None]] = SimpleQueue()
        self._wake, self._is_stopping, self._is_asked = threading.Event(), False, False
        self._thread = threading.Thread(target=self._run, name="paceline-hang-detector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report_to(self, observer: AgentObserver) -> None:
        """Hand over what was found. Call now and then, in the thread that runs the launcher."""
        if observer.wants_evidence():
            self._is_asked = True
            self._wake.set()
        self._others_ended = observer.others_ended
        while not self._found.empty():
            self._found.get()(observer)

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self.tick()
                self._wake.wait(_TICK)
                self._wake.clear()
        except Exception as error:  # must not end the run
            reason = f"{type(error).__name__}: {error}"
            self._found.put(lambda _: log.warning(f"hangs of this node are no longer detected ({reason})"))

    def tick(self) -> None:
        """Look once. Called by the thread."""
        found = self._look()
        if found is None:
            found, self._postponed = self._postponed, None
        else:
            self._postponed_until = self._clock() + _FOR_NAMES
        if (seconds := self._patience.continued()) is not None:
            self._found.put(lambda observer: observer.continued(seconds))
        if found is None and not self._is_asked:
            return
        self._is_asked, before = False, self._seen
        ranks = collect(self._logs, self._pids, self._node)
        self._look()
        has_moved = _have_moved(before, self._seen)
        still = 0.0 if has_moved else self._clock() - self._moved_at
        limit = max((self._patience.limit(seen.phase).seconds for seen in before.values()), default=0.0)
        if found is None:
            self._found.put(lambda observer: observer.evidence(ranks, still, limit))
        elif not has_moved and _lack_names(ranks) and self._clock() < self._postponed_until:
            self._postponed = found
        elif not has_moved:
            told = found._replace(seconds=max(found.seconds, still))
            self._found.put(lambda observer: observer.standstill(told, ranks))

    def _look(self) -> NoProgress | None:
        """Observe all ranks that run."""
        now, running = self._clock(), self._running()
        beats, pages = heartbeat.read(self._logs), heartbeat.read_pages(self._logs)
        own = {rank: pages[rank] for rank in running if rank in pages and pages[rank].pid == self._pids[rank]}
        if any(activity_of(page.place) == "debugger" for page in own.values()):
            return None  # someone looks at it already
        seen = {rank: _observation(beats.get(rank), own.get(rank, RankPage()), self._pids[rank]) for rank in running}
        if self._others_ended or len(seen) < len(self._pids) or any(page.ended for page in own.values()):
            seen = {rank: _at_exit(each, self._pids[rank]) for rank, each in seen.items()}
        if _have_moved(self._seen, seen):
            self._moved_at = now
        self._seen = seen
        return self._patience.observe(now, seen)


def _at_exit(seen: Observation, pid: int) -> Observation:
    """Of a rank that is left when others have ended, unless it trains, or waits for them. Computing is progress then:
    one rank may evaluate or upload for as long as it likes."""
    if seen.phase != "returned" and (seen.phase not in ("", "done") or seen.waits):
        return seen
    computed = int(process_stacks.cpu_seconds(pid) / _LEAST_CPU)
    return seen._replace(phase=EXIT, counters=(*seen.counters, computed), waits=False)


def _have_moved(before: Mapping[int, Observation], after: Mapping[int, Observation]) -> bool:
    return any(rank not in after or after[rank][:3] != seen[:3] for rank, seen in before.items())


def _lack_names(ranks: Sequence[RankEvidence]) -> bool:
    """Whether a rank is in operations that it has not named yet."""
    return any(
        not each.pending and each.silent < _FOR_NAMES and any(group.entered > group.left for group in each.groups)
        for each in ranks
    )


def _observation(beat: Heartbeat | None, page: RankPage, pid: int) -> Observation:
    phase, step = ("", 0) if beat is None else (beat.phase, beat.step)
    counters = (page.micros, page.read, page.calls, page.operations)
    activity = activity_of(page.place)
    in_call = page.place.startswith(("torch.distributed.", "dist.")) and activity == "collective"
    waits = in_call or bool(page.pending) or any(group["entered"] > group["left"] for group in page.groups)
    seems_to_wait, kept_waiting = activity in ("collective", "data"), process_stacks.kept_waiting(pid)
    return Observation(phase, step, counters, waits, seems_to_wait, kept_waiting)


class HangReporter:
    """Publishes reports of hangs, and decides whether ranks are stopped (`--on-hang`)."""

    def __init__(self, spec: LaunchSpec, publish: Callable[[Message], None]) -> None:
        self._spec, self._publish = spec, publish
        self._reported: NoProgress | None = None
        self.hang: Hang | None = None  # for which ranks are stopped

    def is_due(self, *, lasts: bool) -> bool:
        """Whether to report a standstill. If the policy is to stop ranks, it is reported again once it lasts."""
        return self.hang is None and (self._reported is None or (lasts and self._spec.on_hang != "report"))

    def report(
        self, found: NoProgress, ranks: Sequence[RankEvidence], generation: int, restarts: int, *, may_stop: bool = True
    ) -> None:
        self._reported = self._reported or found
        hang = _judge(ranks, found)
        action = _next_action(self._spec, restarts, hang, found)
        self._publish(_hang_message(hang, found, ranks, generation, action))
        if action.stops and may_stop:
            self.hang = hang

    def continued(self, seconds: float) -> None:
        if self._reported is not None:
            self._publish(_continued_message(seconds, self._reported))
            self._reported = None


class HangPolicy(HangReporter, AgentObserver):
    """Reports hangs of the ranks of a single node, and stops them if `--on-hang` says so."""

    def __init__(self, start: LocalStart) -> None:
        super().__init__(start.spec, self._tell)
        self._start = start

    def standstill(self, found: NoProgress, ranks: Sequence[RankEvidence]) -> None:
        generation = self._start.generation
        if self.is_due(lasts=found.lasts):
            self.report(found, ranks, generation, generation - self._start.spec.prior_starts)

    def order(self) -> int | None:
        return None if self.hang is None else 0

    def _tell(self, message: Message) -> None:
        show(message, self._start.logs)
        record(message, self._start.logs)


def _judge(ranks: Sequence[RankEvidence], found: NoProgress) -> Hang:
    """An error in the diagnosis must not end a run that may continue."""
    try:
        return find_hang(ranks, found.seconds, at_exit=found.phase == EXIT)
    except Exception as error:
        return Hang("unknown", (), f"ranks make no progress; the cause was not found ({type(error).__name__}: {error})")


class _NextAction(NamedTuple):
    text: str
    stops: bool = True  # the ranks
    ends_run: bool = True


def _next_action(spec: LaunchSpec, restarts: int, hang: Hang, found: NoProgress) -> _NextAction:
    """What `--on-hang` leads to, after so many restarts."""
    waits = _NextAction("still waiting", stops=False, ends_run=False)
    if spec.on_hang == "report":
        return waits._replace(text=f"{waits.text} (--on-hang restart or stop would stop the ranks)")
    if not found.lasts and hang.kind not in _FINAL:
        lasting = format_duration(LASTING * found.limit)
        return waits._replace(text=f"{waits.text}, for up to {lasting} (--on-hang {spec.on_hang})")
    if spec.on_hang == "stop":
        return _NextAction("stopping the run (--on-hang stop)")
    if restarts < spec.max_restarts:
        return _NextAction("stopping the ranks for a restart (--on-hang restart)", ends_run=False)
    why = "restarts are used up" if spec.max_restarts else "--max-restarts is 0"
    return _NextAction(f"stopping the run (--on-hang restart, but {why})")


def _hang_message(
    hang: Hang, found: NoProgress, ranks: Sequence[RankEvidence], generation: int, action: _NextAction
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


def _continued_message(seconds: float, reported: NoProgress) -> Message:
    text = f"ranks make progress again, after {seconds:.1f} s"
    since_report = max(0.0, seconds - reported.seconds)
    return {"kind": "continued", "text": text, "record": {"seconds": round(since_report, 3)}}


def show(message: Message, logs: RankLogs | None) -> None:
    """On a line of its own: a progress bar may be on the last one."""
    if message["kind"] == "hang":
        where = f"\n  stacks of all ranks: {short(logs.folder.current.hang)}" if logs is not None and logs.run else ""
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


def collect(logs: RunFolder, pids: Mapping[int, int], node: int) -> list[RankEvidence]:
    """Evidence about ranks, by their pids. Takes as long as py-spy: 0.1 s for four ranks on an idle machine, and never
    longer than 6 s."""
    workers = {rank: process_stacks.children_of(pid)[:_WORKERS] for rank, pid in pids.items()}
    states = {pid: process_stacks.state_of(pid) for pid in (*pids.values(), *chain.from_iterable(workers.values()))}
    alive = [pid for pid, state in states.items() if state != "exited"]
    found = process_stacks.read_stacks(alive, {pid: logs.stack(rank) for rank, pid in pids.items()})
    # Afterwards: while it was asked for its stack, a rank on a machine under load may have written its page at last.
    beats, pages, now = heartbeat.read(logs), heartbeat.read_pages(logs), time.monotonic()
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
        evidence.append(values)
    return ranks_from_json(evidence)


def _from_page(page: RankPage | None, pid: int, stack: ProcessStacks, now: float) -> dict[str, Any]:
    # A page may be of a rank before a restart, or of one that has replaced itself by another program.
    if page is None or page.pid != pid or stack.missing == process_stacks.NOT_PYTHON:
        page, silent, unread = RankPage(), 0.0, "its collectives: it has no thread that counts them"
    else:
        silent, unread = 0.0 if page.waits else max(0.0, now - page.time), page.missing
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
