"""Reports hangs from rank 0, as well as it can without a launcher of ours (torchrun, srun).

Ranks also post their stacks then and, every five seconds, that they move (standstill.py). Their threads can't run while
another one holds the GIL or the process is stopped: such a rank is found because the others tell where they are, and if
it is rank 0, nobody reports it. If nobody waits in a collective, only ranks that wait for their data are reported: a
callback or the user's evaluation may take long on every rank alike.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed as torch_dist

from paceline.diagnose.hang.barrier import Post
from paceline.diagnose.hang.evidence import RankEvidence, StackFrame
from paceline.diagnose.hang.hang_report import find_hang
from paceline.diagnose.hang.process_stacks import kept_waiting
from paceline.diagnose.hang.progress_limits import NoProgress, Observation, ProgressLimits
from paceline.diagnose.hang.stack_place import main_place, place_of_stack
from paceline.log import Log
from paceline.run.heartbeat import HeartbeatWriter
from paceline.runtime import rank_watch
from paceline.runtime.whereabouts import GroupBoard, progress

_INTERVAL = 0.25
_ANSWER = 8.0  # seconds in which each rank posts at least once, if its threads run
_UNSEEN = "its threads don't answer: it holds the GIL, is stopped, or its machine or network is down"
_LIMITS = (
    "without paceline launch, a rank that holds the GIL or is stopped can't be located, nor a worker of a DataLoader: "
    "run with paceline launch to see their lines"
)


class HangMonitor:
    """The thread of rank 0."""

    def __init__(self, board: GroupBoard, heartbeat: HeartbeatWriter) -> None:
        self.board, self.heartbeat = board, heartbeat
        self._patience, self._log = ProgressLimits(), Log(board.rank)
        self._has_reported = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-hang-watch", daemon=True)
        # Before the first step, which may end before the thread looks: patience has to see training begin.
        self._patience.observe(time.monotonic(), {board.rank: self._observation()})
        atexit.register(self.end)
        self._thread.start()

    def end(self) -> None:
        """Called when the process exits: a thread in the store's client would be killed in the middle of it."""
        self._stop.set()
        self._thread.join(4 * _INTERVAL)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the group is destroyed, or the rank with the store has ended
            while not self._stop.wait(_INTERVAL) and torch_dist.is_initialized():
                before = self._observation()
                found = self._patience.observe(time.monotonic(), {self.board.rank: before})
                if (seconds := self._patience.continued()) is not None and self._has_reported:
                    self._has_reported = False
                    self._log.info(f"ranks make progress again, after {seconds:.1f} s")
                if found is not None:
                    self._report(found, before)

    def _observation(self) -> Observation:
        last = self.heartbeat.last
        counters = (self.board.calls, progress.micros, progress.read, *_operations())
        activity, without_cpu = main_place().activity, kept_waiting(os.getpid())
        return Observation(last.phase, last.step, counters, activity == "collective", activity == "data", without_cpu)

    def _report(self, found: NoProgress, before: Observation) -> None:
        began = time.monotonic()
        answers = self._answers()
        if self._stop.is_set() or self._observation()[:3] != before[:3]:
            return
        stacks = {rank: _read_stack(self.board, rank) for rank in answers}
        found = found._replace(seconds=found.seconds + time.monotonic() - began)
        text = describe(found, self.board.world, answers, stacks, self.heartbeat.last.trained)
        if text:
            self._has_reported = True
            self._log.warning(text)

    def _answers(self) -> dict[int, Post]:
        """What ranks post from now on, without those whose threads don't run."""
        left = {rank: self.board.read_post(rank) for rank in range(self.board.world)}
        answers: dict[int, Post] = {}
        deadline = time.monotonic() + _ANSWER
        while left and time.monotonic() < deadline and not self._stop.wait(_INTERVAL):
            for rank, earlier in list(left.items()):
                post = self.board.read_post(rank)
                if post is not None and (post.ended or earlier is None or post.serial > earlier.serial):
                    answers[rank] = post
                    del left[rank]
        return answers


def _read_stack(board: GroupBoard, rank: int) -> list[tuple[str, str, int]]:
    text = board.read("stack", rank)
    return [] if text is None else [tuple(frame) for frame in json.loads(text)]


def _operations() -> list[int]:
    """How many collectives this rank has entered and left in each group: the user's own code makes some as well."""
    dumps = (dump(False, True) for dump in rank_watch.flight_recorders().values())
    return [count for dump in dumps for counts in rank_watch.read_counts(dump).values() for count in counts]


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
