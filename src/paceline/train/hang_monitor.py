"""Reports hangs from rank 0, as well as it can without a launcher of ours (torchrun, srun).

Ranks also post their stacks then and, every five seconds, that they move (standstill.py). Their threads can't run while
another one holds the GIL or the process is stopped: such a rank is found because the others tell where they are, and if
it is rank 0, nobody reports it. If nobody waits in a collective, only ranks that wait for their data are reported: a
callback or the user's evaluation may take long on every rank alike.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paceline.diagnose.hang import flight_recorder
from paceline.diagnose.hang.barrier import Post
from paceline.diagnose.hang.evidence import RankEvidence, StackFrame
from paceline.diagnose.hang.hang_report import find_hang
from paceline.diagnose.hang.process_stacks import kept_waiting
from paceline.diagnose.hang.progress_limits import NoProgress, Observation, ProgressLimits
from paceline.diagnose.hang.rank_monitor import INTERVAL
from paceline.diagnose.hang.stack_place import main_place, place_of_stack
from paceline.log import Log
from paceline.run.heartbeat import HeartbeatWriter, counters
from paceline.runtime.collective_check import GroupBoard, require_group

_ANSWER = 8.0  # seconds in which each rank posts at least once, if its threads run
_UNSEEN = "its threads don't answer: it holds the GIL, is stopped, or its machine or network is down"
_LIMITS = (
    "without paceline launch, a rank that holds the GIL or is stopped can't be located, nor a worker of a DataLoader: "
    "run with paceline launch to see their lines"
)


class _Inquiry(NamedTuple):
    """A report that is due once ranks have posted again, which they do if their threads run."""

    found: NoProgress
    before: Observation
    began: float
    earlier: dict[int, Post | None]


class HangMonitor:
    """Of rank 0."""

    def __init__(
        self, board: GroupBoard, heartbeat: HeartbeatWriter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.board, self.heartbeat, self._clock = board, heartbeat, clock
        self._limits, self._log = ProgressLimits(), Log(board.rank)
        self._inquiry: _Inquiry | None = None
        self._has_reported = False
        # Before the first step, which may end before the next tick: the limits have to see training begin.
        self._limits.observe(clock(), {board.rank: self._observation()})

    def tick(self) -> float:
        require_group()
        if self._inquiry is None:
            self._look()
        else:
            self._inquiry = self._conclude(self._inquiry)
        return INTERVAL

    def _look(self) -> None:
        now, before = self._clock(), self._observation()
        found = self._limits.observe(now, {self.board.rank: before})
        if (seconds := self._limits.continued()) is not None and self._has_reported:
            self._has_reported = False
            self._log.info(f"ranks make progress again, after {seconds:.1f} s")
        if found is not None:
            earlier = {rank: self.board.read_post(rank) for rank in range(self.board.world)}
            self._inquiry = _Inquiry(found, before, now, earlier)

    def _observation(self) -> Observation:
        last = self.heartbeat.last
        done = (counters.calls, counters.micros, counters.read, *_operations())
        activity, without_cpu = main_place().activity, kept_waiting(os.getpid())
        return Observation(last.phase, last.step, done, activity == "collective", activity == "data", without_cpu)

    def _conclude(self, inquiry: _Inquiry) -> _Inquiry | None:
        """Report, unless ranks have moved; later, if some may still answer."""
        answers, seconds = {}, self._clock() - inquiry.began
        for rank, earlier in inquiry.earlier.items():
            post = self.board.read_post(rank)
            if post is not None and (post.ended or earlier is None or post.serial > earlier.serial):
                answers[rank] = post
        if len(answers) < len(inquiry.earlier) and seconds < _ANSWER:
            return inquiry
        if self._observation()[:3] == inquiry.before[:3]:
            stacks = {rank: _read_stack(self.board, rank) for rank in answers}
            found = inquiry.found._replace(seconds=inquiry.found.seconds + seconds)
            text = describe(found, self.board.world, answers, stacks, self.heartbeat.last.trained)
            if text:
                self._has_reported = True
                self._log.warning(text)
        return None


def _read_stack(board: GroupBoard, rank: int) -> list[tuple[str, str, int]]:
    text = board.read("stack", rank)
    return [] if text is None else [tuple(frame) for frame in json.loads(text)]


def _operations() -> list[int]:
    """How many collectives this rank has entered and left in each group: the user's own code makes some as well."""
    dumps = (dump(False, True) for dump in flight_recorder.flight_recorders().values())
    return [count for dump in dumps for counts in flight_recorder.read_counts(dump).values() for count in counts]


def describe(
    found: NoProgress,
    world: int,
    answers: Mapping[int, Post],
    stacks: Mapping[int, Sequence[tuple[str, str, int]]],
    step: int | None,
) -> str:
    """Which rank the others wait for; empty if none hangs. `answers`: by rank; `step`: that rank 0 is in."""
    if any(not (post.stalled or post.ended) for post in answers.values()):
        return ""  # it still comes
    ranks = [
        _evidence(rank, answers.get(rank), stacks.get(rank, ()), step if rank == 0 else None) for rank in range(world)
    ]
    activities = {place_of_stack(each.stack).activity for each in ranks}
    hang = find_hang(ranks, found.seconds)
    if "debugger" in activities or (hang.kind == "stands-still" and "data" not in activities):
        return ""
    return f"{hang.text}\nreported after {found.seconds:.1f} s, limit {found.limit:.1f} s: {found.why}\n{_LIMITS}"


def _evidence(rank: int, post: Post | None, stack: Sequence[tuple[str, str, int]], step: int | None) -> RankEvidence:
    if post is None:
        return RankEvidence(rank, missing=_UNSEEN)
    if post.ended:
        return RankEvidence(rank, ended=post.place)
    return RankEvidence(rank, step=step, stack=tuple(StackFrame(*frame) for frame in stack))
