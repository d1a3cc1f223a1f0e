"""Watches whether this rank makes progress, once a second, in the thread of the rank (diagnose/hang/rank_monitor.py).

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
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.diagnose import exits
from paceline.diagnose.hang.evidence import StackFrame
from paceline.diagnose.hang.process_stacks import kept_waiting
from paceline.diagnose.hang.stack_place import StackPlace, main_stack, place_of_stack
from paceline.errors import DataError
from paceline.log import Log
from paceline.run import failures
from paceline.run.heartbeat import HeartbeatWriter, counters
from paceline.runtime import environment, method_check, process_group
from paceline.runtime.collective_check import GroupBoard, current_board, require_group
from paceline.text import by_rank

if TYPE_CHECKING:
    from paceline.train.hang_monitor import HangMonitor

_INTERVAL = 1.0
_WARN, _END = 0.5, 0.8  # of the timeout
_IDLE = 0.05  # seconds of CPU time in an interval, of all threads
_MOVES = 5  # intervals between posts of a rank that makes progress
_progress: ProgressMonitor | None = None
_hangs: HangMonitor | None = None


class ProgressMonitor:
    """Of each rank."""

    def __init__(self, board: GroupBoard) -> None:
        self.board, self._log = board, Log(board.rank, every_rank=True)
        self._before: object = None
        self._stack: list[StackFrame] = []
        self._place = StackPlace("", "")
        self._cpu, self._stalled, self._has_warned = 0.0, 0.0, False
        self._posted = False
        self._intervals = 0  # since the last post
        self._is_asked = not environment.was_launched()

    def tick(self) -> float:
        require_group()
        interval = min(_INTERVAL, self.board.timeout / 20)
        # A rank that gets no CPU does not wait for others. Only its main thread is asked, which a collective blocks.
        now, used = (counters.calls, counters.micros, counters.read), time.process_time() + kept_waiting(os.getpid())
        # Of its own intervals, not of a clock: the process may have been suspended.
        self._stalled = self._stalled + interval if now == self._before else 0.0
        stack = main_stack()
        before, self._place = self._place, place_of_stack(stack)
        is_idle = used - self._cpu < _IDLE * interval and self._place == before
        self._before, self._cpu = now, used
        is_stalled, place = self._stalled > 0, self._place
        if is_stalled and self._is_asked and stack != self._stack:
            self._stack = stack
            self.board.set(json.dumps(stack), "stack", self.board.rank)
        self.board.observe(
            place.text, idle=is_stalled and is_idle and place.activity == "collective", stalled=is_stalled
        )
        self._post(stalled=is_stalled)
        if place.activity != "data" or not is_stalled:
            self._has_warned = False
        elif self._stalled >= _END * self.board.timeout:
            self._fail(place)
        elif self._stalled >= _WARN * self.board.timeout and not self._has_warned:
            self._has_warned = True
            self._log.warning(
                f"rank {self.board.rank} has waited {self._stalled:.0f} s for its next batch: {place.text}"
            )
        return interval

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
    )


def _places(board: GroupBoard) -> list[str]:
    posts = [board.read_post(rank) for rank in range(board.world)]
    # A rank that moved when it posted may be stopped elsewhere by now.
    return [post.place if post is not None and (post.stalled or post.ended) else "not known" for post in posts]


def note_places(error: BaseException) -> None:
    """Add to the timeout of a collective where ranks stand."""
    if _progress is not None and exits.classify(f"{type(error).__name__}: {error}", "") == "timeout":
        with suppress(RuntimeError):  # the rank with the store has ended
            error.add_note(f"Where ranks stand:\n{by_rank(_places(_progress.board))}")


def observe(world: int, heartbeat: HeartbeatWriter) -> None:
    """Observe this rank, and all ranks from rank 0 unless a launcher does, for all Trainers of a process group.
    Collective on first use."""
    global _progress, _hangs
    if world == 1:
        return
    board = _progress.board if _progress is not None and _progress.board.is_current else method_check.join_board()
    from paceline.diagnose.hang import rank_monitor  # one rank needs none

    if _progress is None or _progress.board is not board:
        end()
        _progress = ProgressMonitor(board)
        rank_monitor.current().attach(_progress.tick)
        atexit.unregister(end)
        atexit.register(end)
    if board.rank != 0 or environment.was_launched():
        return
    from paceline.train.hang_monitor import HangMonitor  # with a launcher of ours, no rank needs it

    if _hangs is None:
        _hangs = HangMonitor(board, heartbeat)
        rank_monitor.current().attach(_hangs.tick)
    _hangs.heartbeat = heartbeat


def end() -> None:
    """Before the group is destroyed."""
    from paceline.diagnose.hang import rank_monitor

    global _progress, _hangs
    for each in (_progress, _hangs):
        if each is not None:
            rank_monitor.current().detach(each.tick)
    _progress = _hangs = None


def shorten_timeout(seconds: float) -> None:
    """Call once the first step has shown that all ranks are ready."""
    process_group.shorten_timeout(seconds)
    current_board().timeout = seconds
