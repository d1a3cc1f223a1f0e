"""Runs the ranks of one node, once, under torch's elastic agent.

The agent starts the ranks, sets torchrun's environment variables and monitors the processes. Ranks are forked from this
process, so that torch is imported once. When a rank fails, the others get a moment to exit on their own and are then
stopped; only ranks that exited before that are considered as the cause.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext, SubprocessContext

from paceline.diagnose.exits import RankExit
from paceline.diagnose.oom_killer import OomKillDetector
from paceline.errors import LaunchError
from paceline.launcher.local import interrupts, reaper, rendezvous
from paceline.launcher.local.rank_env import rank_environment
from paceline.launcher.local.rank_main import run_rank
from paceline.launcher.local.start import LocalStart
from paceline.launcher.workload import Workload
from paceline.run import failures, heartbeat

_SETTLING = 0.5  # seconds for ranks to exit on their own after another one failed
_AFTER_TERM = 5.0  # seconds between SIGTERM and SIGKILL
_BLOCKED_SAVE = 1.0  # the same, for ranks blocked in a save that cannot complete
_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn", "torchelastic-events-null")


class AgentObserver(Protocol):
    """Connects the agent to whoever coordinates the ranks of other nodes."""

    def started(self, pids: Collection[int]) -> None:
        """The ranks are running."""

    def failing(self) -> None:
        """A rank of this node failed; the others get a moment to exit."""

    def interrupted(self, number: int) -> None:
        """This launcher received a signal that ends the run."""

    def order(self) -> int | None:
        """A signal to send to the ranks; 0 if ranks of another node failed; None to continue."""


class NullObserver:
    def started(self, pids: Collection[int]) -> None:
        pass

    def failing(self) -> None:
        pass

    def interrupted(self, number: int) -> None:
        pass

    def order(self) -> int | None:
        return None


@dataclass(frozen=True)
class LocalResult:
    """How the ranks of this node exited."""

    ends: tuple[RankExit, ...]
    oom_killed: tuple[int, ...]  # ranks
    signal: int | None = None  # that was sent to this launcher to end the run

    @property
    def is_good(self) -> bool:
        return self.signal is None and all(end.code == 0 for end in self.ends)


def run(workload: Workload, start: LocalStart, watch: AgentObserver | None = None) -> LocalResult:
    """Start the ranks and wait until all have exited."""
    watch = watch or NullObserver()
    logs, ranks, target = start.logs.folder, start.node.rank_range, workload.target
    failures.clear(logs, ranks, everything=0 in ranks)
    workload.prepare(start.node.world)
    if target is not None and (start.spec.fresh or target.kind == "program"):
        logs.target.write_text(json.dumps({**target.to_json(), "folder": str(logs)}))
        args = ("-u", "-P", "-m", "paceline.launcher.local.rank_main", str(logs.target))
        return _supervise(sys.executable, args, start, watch)
    _require_forkable()
    # multiprocessing closes the standard input of forked processes; rank 0 restores it from a copy.
    stdin = _copy_of_stdin()
    try:
        return _supervise(lambda: run_rank(workload.body, logs, stdin), (), start, watch)
    finally:
        if stdin is not None:
            os.close(stdin)


def _copy_of_stdin() -> int | None:
    try:
        return os.dup(0)
    except OSError:
        return None  # it was closed


def _require_forkable() -> None:
    import torch

    if torch.distributed.is_initialized():
        raise LaunchError(
            "group-already-open",
            "Ranks cannot be forked: this process has an initialized process group.",
            why="forked ranks would inherit it",
            fix="call launch() before init_process_group() or after destroy_process_group()",
        )
    if torch.cuda.is_initialized():
        raise LaunchError(
            "gpu-already-open",
            "Ranks cannot be forked: this process has already initialized CUDA.",
            why="CUDA cannot be used in a forked process after its parent initialized it",
            fix="call launch() before anything initializes CUDA (in a notebook, restart the kernel); "
            "torch.cuda.device_count() is safe",
        )


def _supervise(
    entry: Callable[[], None] | str, args: tuple[str, ...], start: LocalStart, watch: AgentObserver
) -> LocalResult:
    # The store is local to this call: the traceback of an error raised later must not keep it, and its port, alive.
    node = start.node
    if node.store is None:
        handler = rendezvous.one_node(start.spec.port)
    else:
        handler = rendezvous.one_of_several(node.store, node.number, node.nodes)
    workers = WorkerSpec(
        role="rank",
        local_world_size=node.ranks,
        rdzv_handler=handler,
        entrypoint=entry,
        args=args,
        max_restarts=max(start.spec.max_restarts, start.generation),
        monitor_interval=0.05,
        master_addr=handler.host,
        master_port=handler.port,
        local_addr=handler.host,
    )
    memory = OomKillDetector()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-agent-"))
        stack.enter_context(rank_environment(start))
        stack.enter_context(_quiet_agent())
        stack.enter_context(interrupts.restored())
        heard = interrupts.Interrupts(stack.enter_context(interrupts.listening()), start.spec.grace)
        agent = _Agent(workers, logs_specs=DefaultLogsSpecs(log_dir=scratch), start_method="fork")
        # Restarts involve all nodes and are decided elsewhere; the agent only needs to know their number.
        agent._remaining_restarts = workers.max_restarts - start.generation
        agent.begin(heard, watch, start)
        agent.run_once(stack)
        return agent.outcome(memory)


class _Finished(Exception):
    """All ranks have exited, some of them with a failure."""


class _Agent(LocalElasticAgent):
    """torch's agent, which also records when and how each rank exited, and lets ranks save before it stops them.

    torch's own result names the lowest failed rank only: a killed rank 1 would be reported as the lost connection of
    rank 0. Its signal handling forwards every signal, even to ranks that already received it, and kills after 30 s.
    """

    def begin(self, heard: interrupts.Interrupts, watch: AgentObserver, start: LocalStart) -> None:
        self._heard, self._watch, self._start = heard, watch, start
        self._ended: dict[int, tuple[int, float]] = {}  # by local rank: exit code and the time it was observed
        self._own_exit: set[int] = set()  # local ranks that exited before they were told to
        self._settling_since: float | None = None
        self._sigterm_at: float | None = None
        self._has_reported_signal = False
        self._log_sizes = failures.log_sizes(start.logs.folder)  # output of earlier starts is not part of this one
        self._stack: ExitStack | None = None

    def run_once(self, stack: ExitStack) -> None:
        self._stack = stack
        try:
            super().run()
        except _Finished:
            return
        finally:
            self._stack = None
        self._note()

    def outcome(self, memory: OomKillDetector) -> LocalResult:
        first, logs = self._start.node.first_rank, self._start.logs.folder
        pages, records = heartbeat.read(logs), failures.read(logs)
        ends = []
        for local in range(self._start.node.ranks):
            code, when = self._ended.get(local, (None, time.time()))
            rank, page = first + local, pages.get(first + local)
            record = records.get(rank)
            own_code = code if local in self._own_exit or code == 0 else None
            ends.append(
                RankExit(
                    rank=rank,
                    node=self._start.node.number,
                    code=own_code,
                    time=record.time if record else when,
                    record=record,
                    phase=page.phase if page else "",
                    step=_step(page),
                    tail=failures.tail(logs, rank, since=self._log_sizes.get(rank, 0)),
                )
            )
        killed = memory.killed([self._pids[end.rank - first] for end in ends if end.code == -signal.SIGKILL])
        ranks = tuple(first + local for local, pid in self._pids.items() if pid in killed)
        ended_by = self._heard.ending
        if ended_by and all(end.code in (None, 0, -ended_by, 128 + ended_by) for end in ends):
            return LocalResult(tuple(ends), ranks, int(ended_by))
        return LocalResult(tuple(ends), ranks)

    def _exit_barrier(self) -> None:
        """Not needed: the coordinator knows when all nodes are done."""

    def _start_workers(self, worker_group: Any) -> Any:
        self._heard.install()
        pids = super()._start_workers(worker_group)
        self._pids: dict[int, int] = dict(pids)
        assert self._stack is not None
        kept = reaper.reaping(list(pids.values()), self._start.spec.grace, self._start.node.orphan_seconds)
        self._stack.enter_context(kept)
        context = self._pcontext  # not self: a reference cycle would keep the agent and the store's port alive
        self._heard.watch(lambda: _running(context))
        self._watch.started(list(pids.values()))
        return pids

    def _monitor_workers(self, worker_group: Any) -> Any:
        self._note()
        self._obey(self._watch.order())
        if self._heard.ending:
            if not self._has_reported_signal:
                self._has_reported_signal = True
                self._watch.interrupted(self._heard.ending)
            if self._heard.is_over or not _busy(self._pcontext):
                self._kill_the_rest()
            return RunResult(state=WorkerState.HEALTHY)
        if self._settling_since is None and any(code for code, _ in self._ended.values()):
            self._watch.failing()
            self._settling_since = time.monotonic()
        if self._settling_since is not None:
            self._settle()
            return RunResult(state=WorkerState.HEALTHY)
        if not _busy(self._pcontext) and 0 in _exit_codes(self._pcontext).values() and self._is_forked:
            self._kill_the_rest()  # one called os._exit(0): torch would wait for its result forever
        result = super()._monitor_workers(worker_group)
        # A rank that failed just now is recorded in the next iteration; torch may have sent SIGTERM to the others.
        return RunResult(state=WorkerState.HEALTHY) if result.is_failed() else result

    @property
    def _is_forked(self) -> bool:
        return isinstance(self._pcontext, MultiprocessContext)

    def _note(self) -> None:
        now = time.time()
        done = set(_exit_codes(self._pcontext)) - set(_busy(self._pcontext))
        for local, code in _exit_codes(self._pcontext).items():
            if local not in self._ended and (code is not None or local in done):
                self._ended[local] = (code or 0, now)
                if self._sigterm_at is None and not self._heard.ending:
                    self._own_exit.add(local)

    def _obey(self, order: int | None) -> None:
        if order == 0:
            self._settling_since = self._settling_since or time.monotonic()
        elif order is not None:
            self._heard.forward(order)

    def _settle(self) -> None:
        """A rank has failed. The others notice it themselves, or get SIGTERM, or are killed."""
        assert self._settling_since is not None
        now = time.monotonic()
        if not _busy(self._pcontext):
            self._kill_the_rest()
        elif self._sigterm_at is None and now > self._settling_since + _SETTLING:
            self._note()
            self._sigterm_at = now
            self._heard.send(signal.SIGTERM)
        elif self._sigterm_at is not None and now > self._sigterm_at + self._patience():
            self._kill_the_rest()

    def _patience(self) -> float:
        """Seconds after SIGTERM. Only rank 0 can still complete a save, with its own data; other ranks that are saving
        wait for it, or for the failed rank, and cannot finish."""
        pages = heartbeat.read(self._start.logs.folder)
        busy = [self._start.node.first_rank + local for local in _busy(self._pcontext)]
        saving = [rank for rank in busy if rank in pages and pages[rank].phase == "saving"]
        if 0 in saving:
            return self._start.spec.grace
        return _BLOCKED_SAVE if saving == busy else _AFTER_TERM

    def _kill_the_rest(self) -> None:
        self._note()
        self._heard.kill()  # a forked rank that is done still waits for its result to be read
        raise _Finished


def _step(page: heartbeat.Heartbeat | None) -> int | None:
    """The current step of a rank, or its last completed one."""
    if page is None or page.phase in ("start", "rendezvous", "load"):
        return None
    return page.step if page.trained is None else page.trained


def _exit_codes(context: Any) -> dict[int, int | None]:
    """The exit code of each rank; None while it is running."""
    if isinstance(context, MultiprocessContext) and context._pc is not None:
        return {rank: process.exitcode for rank, process in enumerate(context._pc.processes)}
    if isinstance(context, SubprocessContext):
        return {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
    return {}


def _running(context: Any) -> list[int]:
    """The processes of running ranks."""
    pids = context.pids()
    return [pids[rank] for rank, code in _exit_codes(context).items() if code is None]


def _busy(context: Any) -> list[int]:
    """Ranks that are not done. A forked rank that is done stays alive until its result is read."""
    ranks = [rank for rank, code in _exit_codes(context).items() if code is None]
    if isinstance(context, MultiprocessContext):
        return [rank for rank in ranks if rank not in context._return_values and context._ret_vals[rank].empty()]
    return ranks


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's log lines about every process it stops; only the first failure is shown."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(_AGENT_LOGGERS)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
