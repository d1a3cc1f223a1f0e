"""Ranks of one machine, started once, under torch's elastic agent.

The agent starts the ranks, gives them torchrun's environment variables and watches them. Ranks are forked from this
process, so that torch is imported once. What happens when one of them fails is decided here: the others may end by
themselves, and are ended when they don't; who was dead before that is what the cause is looked for in.
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

_SETTLING = 0.5  # seconds in which ranks may end by themselves when another one has failed
_AFTER_TERM = 5.0  # and that they have after a SIGTERM
_IN_VAIN = 1.0  # or where they wait for what can't come
_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn", "torchelastic-events-null")


class AgentObserver(Protocol):
    """Who else has a say in when the ranks of this machine end."""

    def started(self, pids: Collection[int]) -> None:
        """The ranks are there."""

    def failing(self) -> None:
        """A rank here has failed; the others are given a moment to end."""

    def interrupted(self, number: int) -> None:
        """This launcher got a signal that ends the run."""

    def order(self) -> int | None:
        """A signal that the ranks shall get; 0: ranks elsewhere have failed; None: go on."""


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
    """How the ranks of this machine ended."""

    ends: tuple[RankExit, ...]
    oom_killed: tuple[int, ...]  # ranks
    signal: int | None = None  # that ended them, at somebody's wish

    @property
    def is_good(self) -> bool:
        return self.signal is None and all(end.code == 0 for end in self.ends)


def run(workload: Workload, start: LocalStart, watch: AgentObserver | None = None) -> LocalResult:
    """Start the ranks and stay until all have ended."""
    watch = watch or NullObserver()
    logs, ranks, target = start.logs.folder, start.node.rank_range, workload.target
    failures.clear(logs, ranks, everything=0 in ranks)
    workload.prepare(start.node.world)
    if target is not None and (start.spec.fresh or target.kind == "program"):
        logs.target.write_text(json.dumps({**target.to_json(), "folder": str(logs)}))
        args = ("-u", "-P", "-m", "paceline.launcher.local.rank_main", str(logs.target))
        return _supervise(sys.executable, args, start, watch)
    _refuse_what_can_not_be_forked()
    # multiprocessing closes the standard input of what it forks: rank 0 gets it back from a copy.
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


def _refuse_what_can_not_be_forked() -> None:
    import torch

    if torch.distributed.is_initialized():
        raise LaunchError(
            "group-already-open",
            "This process is in a process group, so ranks can't be forked from it.",
            why="they would take themselves for members of that group, and wait for each other in it",
            fix="call launch() before the group opens, or after it is closed",
        )
    if torch.cuda.is_initialized():
        raise LaunchError(
            "gpu-already-open",
            "This process has already used a GPU, so ranks can't be forked from it.",
            why="a forked process can't use a GPU that its parent opened",
            fix="call launch() before anything touches the GPU (in a notebook: restart the kernel); "
            "torch.cuda.device_count() is harmless",
        )


def _supervise(
    entry: Callable[[], None] | str, args: tuple[str, ...], start: LocalStart, watch: AgentObserver
) -> LocalResult:
    # The store lives in this call, so that it is gone before an error, whose traceback keeps its frames, is raised.
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
        # Of restarts the agent knows only their number: they are a matter of all nodes, and decided elsewhere.
        agent._remaining_restarts = workers.max_restarts - start.generation
        agent.begin(heard, watch, start)
        agent.run_once(stack)
        return agent.outcome(memory)


class _Over(Exception):
    """All ranks have ended, not all of them well."""


class _Agent(LocalElasticAgent):
    """torch's agent, which also notes when and how each rank ended, and is patient with ranks that were told to stop.

    Its own result names one rank only, the lowest: a killed rank 1 would show up as rank 0's lost connection. And its
    own way with signals is to send each on, also to those who got it already, and to kill what is there after 30 s.
    """

    def begin(self, heard: interrupts.Interrupts, watch: AgentObserver, start: LocalStart) -> None:
        self._heard, self._watch, self._start = heard, watch, start
        self._ended: dict[int, tuple[int, float]] = {}  # by local rank: how, and when that was seen
        self._own_end: set[int] = set()  # that ended before anybody told them to
        self._settling_since: float | None = None
        self._termed_at: float | None = None
        self._has_reported_signal = False
        self._log_sizes = failures.log_sizes(start.logs.folder)  # what is there already was said by an earlier start
        self._stack: ExitStack | None = None

    def run_once(self, stack: ExitStack) -> None:
        self._stack = stack
        try:
            super().run()
        except _Over:
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
            own_code = code if local in self._own_end or code == 0 else None
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
        """Whoever watches over several nodes knows when all have ended."""

    def _start_workers(self, worker_group: Any) -> Any:
        self._heard.install()
        pids = super()._start_workers(worker_group)
        self._pids: dict[int, int] = dict(pids)
        assert self._stack is not None
        kept = reaper.reaping(list(pids.values()), self._start.spec.grace, self._start.node.orphan_seconds)
        self._stack.enter_context(kept)
        context = self._pcontext  # not self: a cycle would keep the agent, and with it the store's port
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
            self._kill_the_rest()  # one left by os._exit(0): torch would wait for its result for ever
        result = super()._monitor_workers(worker_group)
        # One that failed just now is seen at the next look; torch may have sent the others a SIGTERM already.
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
                if self._termed_at is None and not self._heard.ending:
                    self._own_end.add(local)

    def _obey(self, order: int | None) -> None:
        if order == 0:
            self._settling_since = self._settling_since or time.monotonic()
        elif order is not None:
            self._heard.told(order)

    def _settle(self) -> None:
        """One rank has failed. The others learn of it by themselves, or by a signal, or are ended."""
        assert self._settling_since is not None
        now = time.monotonic()
        if not _busy(self._pcontext):
            self._kill_the_rest()
        elif self._termed_at is None and now > self._settling_since + _SETTLING:
            self._note()
            self._termed_at = now
            self._heard.send(signal.SIGTERM)
        elif self._termed_at is not None and now > self._termed_at + self._patience():
            self._kill_the_rest()

    def _patience(self) -> float:
        """Seconds after a SIGTERM. Only the first rank can still bring a save to its end, with what it holds itself;
        others that save wait for it, or for the one that is gone, in vain."""
        pages = heartbeat.read(self._start.logs.folder)
        busy = [self._start.node.first_rank + local for local in _busy(self._pcontext)]
        saving = [rank for rank in busy if rank in pages and pages[rank].phase == "saving"]
        if 0 in saving:
            return self._start.spec.grace
        return _IN_VAIN if saving == busy else _AFTER_TERM

    def _kill_the_rest(self) -> None:
        self._note()
        self._heard.kill()  # a rank whose work is done still waits for our word
        raise _Over


def _step(page: heartbeat.Heartbeat | None) -> int | None:
    """The step that a rank was in, or the last one that it had done."""
    if page is None or page.phase in ("start", "rendezvous", "load"):
        return None
    return page.step if page.trained is None else page.trained


def _exit_codes(context: Any) -> dict[int, int | None]:
    """How each rank ended, None for those that run."""
    if isinstance(context, MultiprocessContext) and context._pc is not None:
        return {rank: process.exitcode for rank, process in enumerate(context._pc.processes)}
    if isinstance(context, SubprocessContext):
        return {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
    return {}


def _running(context: Any) -> list[int]:
    """The processes of ranks that have not ended."""
    pids = context.pids()
    return [pids[rank] for rank, code in _exit_codes(context).items() if code is None]


def _busy(context: Any) -> list[int]:
    """Ranks that have work left: a forked one that is done lives on until its result was taken."""
    ranks = [rank for rank, code in _exit_codes(context).items() if code is None]
    if isinstance(context, MultiprocessContext):
        return [rank for rank in ranks if rank not in context._return_values and context._ret_vals[rank].empty()]
    return ranks


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs every process that it ends; the first failure is what a person needs, and we show that."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(_AGENT_LOGGERS)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
