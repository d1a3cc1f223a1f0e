"""Watches whether this rank makes progress, in a thread that looks at the main thread once a second.

    stands still     post where it stands, for ranks that wait (runtime/whereabouts.py)
    half of `timeout`, in the Trainer's data
                     warn, with the line of the user's code
    0.8 × `timeout`, in the Trainer's data
                     end this rank with `data.stands-still`, before ranks that wait for it time out

Without a launcher of ours (torchrun, srun), a thread of rank 0 reports hangs as well as it can: ranks also post their
stacks and, every five seconds, that they move. Their threads can't run while another one holds the GIL or the process
is stopped: such a rank is found because the others tell where they are, and if it is rank 0, nobody reports it.
`paceline launch` looks from outside, and this thread is not started. If nobody waits in a collective, only ranks that
wait for their data are reported: a callback or the user's evaluation may take long on every rank alike.

Collectives have their own timeout. Nothing else ends a run: a long callback, an evaluation or a compilation is slow on
every rank alike, and a debugger may stop anywhere.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from paceline.diagnose import exits
from paceline.diagnose.hang.evidence import RankEvidence, StackFrame
from paceline.diagnose.hang.hang_report import find_hang
from paceline.diagnose.hang.process_stacks import kept_waiting
from paceline.diagnose.hang.progress_limits import NoProgress, Observation, ProgressLimits
from paceline.diagnose.hang.stack_place import StackPlace, main_place, main_stack, place_of_stack
from paceline.errors import DataError
from paceline.log import Log
from paceline.run import failures
from paceline.run.heartbeat import HeartbeatWriter
from paceline.runtime import environment, process_group, rank_watch, whereabouts
from paceline.runtime.whereabouts import Board, Post, progress
from paceline.text import by_rank

_INTERVAL = 1.0
_WARN, _END = 0.5, 0.8  # of the timeout
_IDLE = 0.05  # seconds of CPU time in an interval, of all threads
_MOVES = 5  # intervals between posts of a rank that makes progress
_HANG_INTERVAL = 0.25
_ANSWER = 8.0  # seconds in which each rank posts at least once, if its threads run
_UNSEEN = "its threads don't answer: it holds the GIL, is stopped, or its machine or network is down"
_LIMITS = (
    "without paceline launch, a rank that holds the GIL or is stopped can't be located, nor a worker of a DataLoader: "
    "run with paceline launch to see their lines"
)
_watch: ProgressMonitor | None = None
_hang_watch: HangMonitor | None = None


class HangMonitor:
    """The thread of rank 0."""

    def __init__(self, board: Board, heartbeat: HeartbeatWriter) -> None:
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
        self._thread.join(4 * _HANG_INTERVAL)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the group is destroyed, or the rank with the store has ended
            while not self._stop.wait(_HANG_INTERVAL):
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
        stacks = {rank: self.board.read_stack(rank) for rank in answers}
        found = found._replace(seconds=found.seconds + time.monotonic() - began)
        text = describe(found, self.board.world, answers, stacks, self.heartbeat.last.trained)
        if text:
            self._has_reported = True
            self._log.warning(text)

    def _answers(self) -> dict[int, Post]:
        """What ranks post from now on, without those whose threads don't run."""
        left = {rank: self.board.read(rank) for rank in range(self.board.world)}
        answers: dict[int, Post] = {}
        deadline = time.monotonic() + _ANSWER
        while left and time.monotonic() < deadline and not self._stop.wait(_HANG_INTERVAL):
            for rank, earlier in list(left.items()):
                post = self.board.read(rank)
                if post is not None and (post.ended or earlier is None or post.number > earlier.number):
                    answers[rank] = post
                    del left[rank]
        return answers


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
    if any(not (post.stands or post.ended) for post in answers.values()):
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


class ProgressMonitor:
    """The thread of this process."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-standstill", daemon=True)
        self._log = Log(board.rank, every_rank=True)
        self._posted = False
        self._intervals = 0  # since the last post
        self._is_asked = not environment.was_launched()
        self._stack: list[StackFrame] = []  # that was posted last
        atexit.register(self.end)
        self._thread.start()

    def end(self) -> None:
        """Called when the process exits: a thread in the store's client would be killed in the middle of it."""
        self._stop.set()
        self._thread.join(_INTERVAL)
        with suppress(Exception):  # the group is destroyed, or the rank with the store has ended
            self.board.post(progress.ended, ended=True)

    def _run(self) -> None:
        before, place, cpu, stood, warned = None, StackPlace("", ""), 0.0, 0.0, False
        while not self._stop.wait(min(_INTERVAL, self.board.timeout / 20)):
            now = (self.board.calls, progress.micros, progress.read)
            interval, used = min(_INTERVAL, self.board.timeout / 20), time.process_time()
            # Of this thread's own intervals, not of a clock: the process may have been suspended.
            stood = stood + interval if now == before else 0.0
            stack = main_stack()
            last, place = place, place_of_stack(stack)
            idle = used - cpu < _IDLE * interval and place == last
            before, cpu = now, used
            try:
                if stood > 0 and self._is_asked and stack != self._stack:
                    self._stack = stack
                    self.board.post_stack(stack)
                self._post(place, stands=stood > 0, waits=idle and place.activity == "collective")
            except RuntimeError:  # the group is destroyed, or the rank with the store has ended
                return
            if place.activity != "data" or stood == 0:
                warned = False
            elif stood >= _END * self.board.timeout:
                self._fail(place)
            elif stood >= _WARN * self.board.timeout and not warned:
                warned = True
                self._log.warning(f"rank {self.board.rank} has waited {stood:.0f} s for its next batch: {place.text}")

    def _post(self, place: StackPlace, *, stands: bool, waits: bool) -> None:
        self._intervals += 1
        if stands or self._posted or (self._is_asked and self._intervals == _MOVES):
            self._posted, self._intervals = stands, 0
            self.board.post(place.text, waits=stands and waits, stands=stands)

    def _fail(self, place: StackPlace) -> None:
        """End the process: no exception can be raised in a thread that waits for a lock or a file."""
        board = self.board
        lines = [place.text if rank == board.rank else text for rank, text in enumerate(_places(board))]
        failure = failures.describe(stands_still(board.rank, lines, _END * self.board.timeout), board.rank)
        logs = environment.log_folder()
        if logs is not None:
            failures.write(failure, logs)
        print(failure.text, file=sys.stderr, flush=True)  # noqa: T201
        for child in multiprocessing.active_children():  # workers of a DataLoader
            child.kill()
        os._exit(failure.exit_code)


def stands_still(rank: int, places: list[str], seconds: float) -> DataError:
    return DataError(
        "stands-still",
        f"Rank {rank} has waited {seconds:g} s for its next batch. Where ranks stand:\n{by_rank(places)}",
        why="a dataset, or a worker of its DataLoader, waits for a lock, a file or the network",
        fix="look at the line above, and at workers if the DataLoader has any (workers=0 shows their lines); if the "
        "data is only slow, raise timeout",
    )


def _places(board: Board) -> list[str]:
    posts = [board.read(rank) for rank in range(board.world)]
    # A rank that moved when it posted may be stopped elsewhere by now.
    return [post.place if post is not None and (post.stands or post.ended) else "not known" for post in posts]


def note_places(error: BaseException) -> None:
    """Add to the timeout of a collective where ranks stand."""
    if _watch is not None and exits.classify(f"{type(error).__name__}: {error}", "") == "timeout":
        with suppress(RuntimeError):  # the rank with the store has ended
            error.add_note(f"Where ranks stand:\n{by_rank(_places(_watch.board))}")


def watch(world: int, heartbeat: HeartbeatWriter) -> None:
    """Watch this rank, and all ranks from rank 0 unless a launcher does. One thread of each kind serves all Trainers of
    a process group. Collective on first use."""
    global _watch, _hang_watch
    if world == 1:
        return
    board = whereabouts.board()
    if _watch is None or _watch.board is not board:
        _watch = ProgressMonitor(board)
    if board.rank != 0 or environment.was_launched():
        return
    if _hang_watch is None or _hang_watch.board is not board:
        if _hang_watch is not None:
            _hang_watch.end()
        _hang_watch = HangMonitor(board, heartbeat)
    _hang_watch.heartbeat = heartbeat


def shorten_timeout(seconds: float) -> None:
    """Call once the first step has shown that all ranks are ready."""
    process_group.shorten_timeout(seconds)
    whereabouts.board().timeout = seconds
