"""Watches whether this rank makes progress, in a thread that looks at the main thread once a second.

    stands still     post where it stands, for ranks that wait (diagnose/hang/barrier.py)
    half of `timeout`, in the Trainer's data
                     warn, with the line of the user's code
    0.8 × `timeout`, in the Trainer's data
                     end this rank with `data.stands-still`, before ranks that wait for it time out

Collectives have their own timeout. Nothing else ends a run: a long callback, an evaluation or a compilation is slow on
every rank alike, and a debugger may stop anywhere.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch.distributed as torch_dist

from paceline.diagnose import exits
from paceline.diagnose.hang.evidence import StackFrame
from paceline.diagnose.hang.stack_place import StackPlace, main_stack, place_of_stack
from paceline.errors import DataError
from paceline.log import Log
from paceline.run import failures
from paceline.run.heartbeat import HeartbeatWriter
from paceline.runtime import environment, method_check, process_group, whereabouts
from paceline.runtime.whereabouts import GroupBoard, progress
from paceline.text import by_rank

if TYPE_CHECKING:
    from paceline.train.hang_monitor import HangMonitor

_INTERVAL = 1.0
_WARN, _END = 0.5, 0.8  # of the timeout
_IDLE = 0.05  # seconds of CPU time in an interval, of all threads
_MOVES = 5  # intervals between posts of a rank that makes progress
_watch: ProgressMonitor | None = None
_hang_watch: HangMonitor | None = None


class ProgressMonitor:
    """The thread of this process."""

    def __init__(self, board: GroupBoard) -> None:
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

    def _run(self) -> None:
        before, place, cpu, stood, warned = None, StackPlace("", ""), 0.0, 0.0, False
        while not self._stop.wait(min(_INTERVAL, self.board.timeout / 20)) and torch_dist.is_initialized():
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
                    self.board.set(json.dumps(stack), "stack", self.board.rank)
                self.board.observe(
                    place.text, idle=stood > 0 and idle and place.activity == "collective", stalled=stood > 0
                )
                self._post(stalled=stood > 0)
            except RuntimeError:  # the group is destroyed, or the rank with the store has ended
                return
            if place.activity != "data" or stood == 0:
                warned = False
            elif stood >= _END * self.board.timeout:
                self._fail(place)
            elif stood >= _WARN * self.board.timeout and not warned:
                warned = True
                self._log.warning(f"rank {self.board.rank} has waited {stood:.0f} s for its next batch: {place.text}")

    def _post(self, *, stalled: bool) -> None:
        self._intervals += 1
        if stalled or self._posted or (self._is_asked and self._intervals == _MOVES):
            self._posted, self._intervals = stalled, 0
            self.board.post()

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


def _places(board: GroupBoard) -> list[str]:
    posts = [board.read_post(rank) for rank in range(board.world)]
    # A rank that moved when it posted may be stopped elsewhere by now.
    return [post.place if post is not None and (post.stalled or post.ended) else "not known" for post in posts]


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
    board = method_check.join_board()
    if _watch is None or _watch.board is not board:
        _watch = ProgressMonitor(board)
    if board.rank != 0 or environment.was_launched():
        return
    from paceline.train.hang_monitor import HangMonitor  # with a launcher of ours, no rank needs it

    if _hang_watch is None or _hang_watch.board is not board:
        if _hang_watch is not None:
            _hang_watch.end()
        _hang_watch = HangMonitor(board, heartbeat)
    _hang_watch.heartbeat = heartbeat


def shorten_timeout(seconds: float) -> None:
    """Call once the first step has shown that all ranks are ready."""
    process_group.shorten_timeout(seconds)
    whereabouts.board().timeout = seconds
