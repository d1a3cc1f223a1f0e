"""Watches the ranks of this node for a standstill, in a thread of the launcher.

Four times a second it reads how far each rank has come, from the rank's heartbeat and page. If they come no further for
longer than their phase allows (diagnose/patience.py), it collects evidence (hang_report.py) and hands it over, unless
a rank has moved meanwhile. It runs between the start of the last rank and the end of the generation: processes are
forked only without it.

If this process is stopped (Ctrl-Z), its ranks usually are as well: Patience counts a second of that at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue

from paceline import log
from paceline.diagnose import stacks
from paceline.diagnose.evidence import RankEvidence
from paceline.diagnose.patience import EXIT, Observation, Patience, Standstill
from paceline.diagnose.place import activity_of
from paceline.launcher.local import hang_report
from paceline.launcher.local.start import AgentObserver
from paceline.run import heartbeat, rank_page
from paceline.run.folder import RunFolder
from paceline.run.heartbeat import Heartbeat
from paceline.run.rank_page import RankPage

_TICK = 0.25
_LEAST_CPU = 0.5  # seconds; threads that only wait, for the GIL or to look around, use half of that in a minute
_FOR_NAMES = 2.0  # seconds in which ranks on a busy machine have found out which operations they are in


class Watchdog:
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
        self._patience = Patience()
        self._seen: dict[int, Observation] = {}
        self._moved_at = clock()  # when a rank made progress last
        self._others_ended = False  # ranks of other nodes
        self._postponed: Standstill | None = None  # a report, until then
        self._postponed_until = 0.0
        self._found: SimpleQueue[Callable[[AgentObserver], None]] = SimpleQueue()
        self._wake, self._is_stopping, self._is_asked = threading.Event(), False, False
        self._thread = threading.Thread(target=self._run, name="paceline-watchdog", daemon=True)

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
        ranks = hang_report.collect(self._logs, self._pids, self._node)
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

    def _look(self) -> Standstill | None:
        """Observe all ranks that run."""
        now, running = self._clock(), self._running()
        beats, pages = heartbeat.read(self._logs), rank_page.read_pages(self._logs)
        own = {rank: pages[rank] for rank in running if rank in pages and pages[rank].pid == self._pids[rank]}
        if any(activity_of(page.place) == "debugger" for page in own.values()):
            return None  # someone looks at it already
        seen = {rank: _observation(beats.get(rank), own.get(rank, RankPage())) for rank in running}
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
    computed = int(stacks.cpu_seconds(pid) / _LEAST_CPU)
    return seen._replace(phase=EXIT, counters=(*seen.counters, computed), waits=False)


def _have_moved(before: Mapping[int, Observation], after: Mapping[int, Observation]) -> bool:
    return any(rank not in after or after[rank][:3] != seen[:3] for rank, seen in before.items())


def _lack_names(ranks: Sequence[RankEvidence]) -> bool:
    """Whether a rank is in operations that it has not named yet."""
    return any(
        not each.pending and each.silent < _FOR_NAMES and any(group.entered > group.left for group in each.groups)
        for each in ranks
    )


def _observation(beat: Heartbeat | None, page: RankPage) -> Observation:
    phase, step = ("", 0) if beat is None else (beat.phase, beat.step)
    counters = (page.micros, page.read, page.calls, page.operations)
    activity = activity_of(page.place)
    in_call = page.place.startswith(("torch.distributed.", "dist.")) and activity == "collective"
    waits = in_call or bool(page.pending) or any(group["entered"] > group["left"] for group in page.groups)
    return Observation(phase, step, counters, waits, seems_to_wait=activity in ("collective", "data"))
