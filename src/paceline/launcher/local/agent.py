"""Runs the ranks of one node, once.

Ranks get torchrun's environment variables and are forked, so that torch is imported once. When a rank fails, the others
get a moment to exit on their own and are then stopped; only ranks that exited before that are considered as the cause.

A single node listens on loopback only. With several nodes, the coordinator (cluster/coordinator.py) opens a new store
for every start of the ranks, so that it contains nothing of an earlier one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from paceline import log
from paceline.config.launch import Endpoint
from paceline.diagnose.exits import OomKillDetector, RankExit, unrecorded
from paceline.diagnose.hang.evidence import Hang
from paceline.errors import LaunchError
from paceline.launcher.local import hang_detector, interrupts
from paceline.launcher.local.hang_detector import HangDetector, HangPolicy
from paceline.launcher.local.rank_main import run_rank
from paceline.launcher.local.rank_parent import RankProcesses
from paceline.launcher.local.start import AgentObserver, LocalStart, rank_environment
from paceline.launcher.workload import Workload
from paceline.run import failures, heartbeat, regular_files
from paceline.runtime.network import LOOPBACK, listen
from paceline.runtime.process_group import open_store

_SETTLING = 0.5  # seconds for ranks to exit on their own after another one failed
_AFTER_TERM = 5.0  # seconds between SIGTERM and SIGKILL
_BLOCKED_SAVE = 1.0  # the same, for ranks blocked in a save that cannot complete
_HUNG = 1.0  # the same, for ranks that are stopped because they made no progress
_AFTER_KILL = 10.0  # seconds for killed ranks to disappear; one blocked in the kernel is left behind
_POLL_SECONDS = 0.05
_REACH_SECONDS = 60.0  # to connect to the store of the coordinator


@dataclass(frozen=True)
class LocalResult:
    """How the ranks of this node exited."""

    ends: tuple[RankExit, ...]
    oom_killed: tuple[int, ...]  # ranks
    signal: int | None = None  # that was sent to this launcher to end the run
    hang: Hang | None = None  # for which the ranks were stopped

    @property
    def is_good(self) -> bool:
        return self.signal is None and all(end.code == 0 for end in self.ends)


def run(workload: Workload, start: LocalStart, watch: AgentObserver | None = None) -> LocalResult:
    """Start the ranks and wait until all have exited."""
    watch = watch or HangPolicy(start)
    logs, ranks, target = start.logs.folder, start.node.rank_range, workload.target
    failures.clear(logs, ranks, everything=0 in ranks)
    workload.prepare(start.node.world)
    is_fresh = target is not None and (start.spec.fresh or target.kind == "program")
    if target is not None and is_fresh:
        regular_files.replace(logs.target, json.dumps({**target.to_json(), "folder": str(logs)}).encode())
    else:
        require_forkable()
    with ExitStack() as stack:
        # From here on signals are noted, and no exception interrupts the start or the end of the ranks.
        stack.enter_context(interrupts.restored())
        heard = interrupts.Interrupts(start.spec.grace)
        heard.install()
        monitor = _Monitor(heard, watch, start)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-agent-"))
        # The store is local to this call: the traceback of an error raised later must not keep it, and its port, alive.
        store = _open_store(start)
        variables = rank_environment(start, Endpoint(store.host, store.port), scratch)
        # multiprocessing closes the standard input of forked processes; it is restored from a copy.
        stdin = None
        with suppress(OSError):  # it is closed
            stdin = os.dup(0)
            stack.callback(os.close, stdin)

        def entry(local: int) -> None:
            os.environ.update(variables[local])
            if is_fresh:
                _become_fresh(str(logs.target), stdin)
            run_rank(workload.body, logs, workload.name or start.spec.run or "", stdin)

        if heard.ending is None:
            monitor.run(entry)
        return monitor.outcome()


def _open_store(start: LocalStart) -> TCPStore:
    """That of a single node, or the one that the coordinator opened: connecting to it detects early that it cannot be
    reached."""
    address = start.node.store
    if address is None:
        return open_store(listen(LOOPBACK, start.spec.port))
    return TCPStore(*address, is_master=False, timeout=timedelta(seconds=_REACH_SECONDS), wait_for_workers=False)


def _become_fresh(target: str, stdin: int | None) -> None:
    os.setsid()
    if stdin is not None:
        os.dup2(stdin, 0)
    os.execv(sys.executable, [sys.executable, "-u", "-P", "-m", "paceline.launcher.local.rank_main", target])


def require_forkable() -> None:
    """Raise if processes that use torch can't be forked from this one any more."""
    import torch

    if torch.distributed.is_initialized():
        raise LaunchError(
            "group-already-open", "Ranks cannot be forked: this process has an initialized process group."
        )
    if torch.cuda.is_initialized():
        raise LaunchError("gpu-already-open", "Ranks cannot be forked: this process has already initialized CUDA.")


class _Monitor:
    """Records when and how each rank exited, and lets ranks save before it stops them."""

    def __init__(self, heard: interrupts.Interrupts, watch: AgentObserver, start: LocalStart) -> None:
        self._heard, self._watch, self._start = heard, watch, start
        self._memory = OomKillDetector()
        self._log_sizes = failures.log_sizes(start.logs.folder)  # output of earlier starts is not part of this one
        self._ended: dict[int, tuple[int, float]] = {}  # by local rank: exit code and time
        self._own_exit: set[int] = set()  # local ranks that exited before they were told to
        self._settling_since: float | None = None
        self._sigterm_at: float | None = None
        self._has_reported_start = self._has_reported_signal = self._has_reported_second = False
        self._pids: dict[int, int] = {}
        self._detector: HangDetector | None = None  # from when all ranks run: it is a thread, and forks come before it

    def run(self, entry: Callable[[int], None]) -> None:
        node = self._start.node
        limits = (self._start.spec.grace, node.orphan_seconds)
        with RankProcesses(node.ranks, entry, *limits, self._note_killed_launcher) as self._ranks:
            self._heard.attach(self._ranks)
            try:
                while self._ranks.running and not self._is_given_up():
                    self._ranks.receive(_POLL_SECONDS)
                    self._note()
                    self._step()
            finally:
                self._heard.attach(None)
                if self._detector is not None:
                    self._detector.stop()
        self._note()
        if number := self._ranks.ended_leftovers:
            log.info(f"note: ended {number} child process{'es' * (number > 1)} of ranks that had exited")

    def _note_killed_launcher(self) -> None:
        """In the parent of the ranks. Launchers of several nodes are replaced, and report to each other."""
        if self._start.node.first_rank == 0:
            what = "the launcher was killed, and ended its ranks by that"
            self._start.logs.note("ended", state="interrupted", cause="launcher killed", what=what)

    def outcome(self) -> LocalResult:
        first, logs = self._start.node.first_rank, self._start.logs.folder
        pages, records = heartbeat.read(logs), failures.read(logs)
        ends = []
        for local in range(self._start.node.ranks):
            code, when = self._ended.get(local, (None, time.time()))
            rank, page = first + local, pages.get(first + local)
            own_code = code if local in self._own_exit or code == 0 else None
            record = records.get(rank) or unrecorded(logs, rank, own_code, when)
            failures.release(logs, rank)
            hang_detector.remove_files(logs, rank)
            ends.append(
                RankExit(
                    rank=rank,
                    node=self._start.node.number,
                    code=own_code,
                    time=record.time if record else when,
                    record=record,
                    phase=page.phase if page else "",
                    step=page.reached if page else None,
                    tail=failures.tail(logs, rank, since=self._log_sizes.get(rank, 0)),
                )
            )
        killed = self._memory.killed([self._pids[end.rank - first] for end in ends if end.code == -signal.SIGKILL])
        ranks = tuple(first + local for local, pid in self._pids.items() if pid in killed)
        ended_by = self._heard.ending
        if ended_by and all(end.code in (None, 0, -ended_by, 128 + ended_by) for end in ends):
            return LocalResult(tuple(ends), ranks, int(ended_by))
        return LocalResult(tuple(ends), ranks, hang=self._watch.hang)

    def _step(self) -> None:
        if self._ranks.have_started and not self._has_reported_start:
            self._has_reported_start = True
            self._watch.started(list(self._ranks.pids.values()))
            node = self._start.node
            pids = {node.first_rank + local: pid for local, pid in self._ranks.pids.items()}
            self._detector = HangDetector(self._start.logs.folder, pids, self._running_ranks, node.number)
            self._detector.start()
        if self._detector is not None and self._settling_since is None and not self._heard.ending:
            self._detector.report_to(self._watch)
        self._obey(self._watch.order())
        if self._heard.ending:
            if not self._has_reported_signal:
                self._has_reported_signal = True
                self._watch.interrupted(self._heard.ending)
            if self._heard.is_second and not self._has_reported_second:
                self._has_reported_second = True
                self._watch.interrupted(signal.SIGKILL)
            if self._heard.is_over:
                self._heard.kill()
            return
        if self._settling_since is None and any(code for code, _ in self._ended.values()):
            self._watch.failing()
            self._settling_since = time.monotonic()
        if self._settling_since is not None:
            self._settle(self._settling_since)

    def _running_ranks(self) -> list[int]:
        return [self._start.node.first_rank + local for local in self._ranks.running]

    def _is_given_up(self) -> bool:
        return self._heard.killed_at is not None and time.monotonic() > self._heard.killed_at + _AFTER_KILL

    def _note(self) -> None:
        self._pids = self._ranks.pids
        for local, ended in self._ranks.exits.items():
            if local not in self._ended:
                self._ended[local] = ended
                if self._sigterm_at is None and self._heard.killed_at is None and not self._heard.ending:
                    self._own_exit.add(local)

    def _obey(self, order: int | None) -> None:
        if order == 0:
            self._settling_since = self._settling_since or time.monotonic()
        elif order is not None:
            self._heard.forward(order)

    def _settle(self, since: float) -> None:
        """A rank has failed. The others notice it themselves, or get SIGTERM, or are killed."""
        now = time.monotonic()
        if self._sigterm_at is None and now > since + _SETTLING:
            self._sigterm_at = now
            self._heard.send(signal.SIGTERM)
        elif self._sigterm_at is not None and now > self._sigterm_at + self._patience():
            self._heard.kill()

    def _patience(self) -> float:
        """Seconds after SIGTERM. Only rank 0 can still complete a save, with its own data; other ranks that are saving
        wait for it, or for the failed rank, and cannot finish."""
        if self._watch.hang is not None:
            return _HUNG
        pages = heartbeat.read(self._start.logs.folder)
        busy = self._running_ranks()
        saving = [rank for rank in busy if rank in pages and pages[rank].phase == "saving"]
        if 0 in saving:
            return self._start.spec.grace
        return _BLOCKED_SAVE if saving == busy else _AFTER_TERM
