"""Ranks of one machine, under torch's elastic agent.

The agent starts the ranks, gives them torchrun's environment variables, and ends all when one fails. Around it: a
store that listens on loopback only, and ranks that are forked from this process, so that torch is imported once.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.errors import LaunchError
from paceline.launcher import failure, interrupts
from paceline.launcher.child import run_rank
from paceline.launcher.target import Target
from paceline.runtime import environment

LOOPBACK = "127.0.0.1"
GRACE = 30.0  # seconds that a SIGTERM leaves the ranks
_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn", "torchelastic-events-null")


class OneNode(RendezvousHandler):
    """The meeting of a single node with itself: a store on loopback, at a free port unless one was asked for."""

    def __init__(self, port: int | None) -> None:
        self._id = uuid.uuid4().hex
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=300),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=self._listener.detach(),  # the store closes it
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "paceline-one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._id

    def shutdown(self) -> bool:
        return True


def _listen(port: int | None) -> socket.socket:
    if port is not None and not 0 < port < 65536:
        raise LaunchError("bad-number", f"{port} is no port.", fix="give one from 1 to 65535, or none")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port or 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise LaunchError(
            "port-in-use",
            f"{f'Port {port}' if port else 'A port on loopback'} can't be opened: {error.strerror}.",
            why="another program listens there, or it needs rights",
            fix="choose another port, or leave it out: a free one is found",
        ) from None
    return listener


@dataclass(frozen=True)
class Start:
    """How to start the ranks of this machine."""

    ranks: int
    logs: Path
    port: int | None = None
    grace: float = GRACE


def run_forked(body: Callable[[], None], start: Start) -> None:
    """Run `body` in forked ranks until all are done; raises the first failure."""
    _refuse_what_can_not_be_forked()
    # multiprocessing closes the standard input of what it forks: rank 0 gets it back from a copy.
    stdin = _copy_of_stdin()
    try:
        _run(lambda: run_rank(body, start.logs, stdin), (), start)
    finally:
        if stdin is not None:
            os.close(stdin)


def run_fresh(target: Target, start: Start) -> None:
    """Run a target in new interpreters: for variables that act when torch is imported, and for programs."""
    spec = start.logs / "target.json"
    spec.write_text(json.dumps({**target.to_json(), "logs": str(start.logs)}))
    _run(sys.executable, ("-u", "-P", "-m", "paceline.launcher.child", str(spec)), start)


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
            fix="call launch() before anything touches the GPU; torch.cuda.device_count() is harmless",
        )


def _run(entry: Callable[[], None] | str, args: tuple[str, ...], start: Start) -> None:
    # The store lives in the call, so that it is gone before an error, whose traceback keeps its frames, is raised.
    result = _supervise(entry, args, start)
    if isinstance(result, SignalException):
        raise SystemExit(128 + result.sigval)
    if result:
        raise failure.Failed(failure.first_failure(start.logs, result))


def _supervise(
    entry: Callable[[], None] | str, args: tuple[str, ...], start: Start
) -> dict[int, int] | SignalException:
    """Run the agent to its end: nothing if all went well, else the exit codes of the ranks that failed before the
    others were ended; or the signal that ended it all."""
    meeting = OneNode(start.port)
    spec = WorkerSpec(
        role="rank",
        local_world_size=start.ranks,
        rdzv_handler=meeting,
        entrypoint=entry,
        args=args,
        max_restarts=0,
        monitor_interval=0.05,
        master_addr=LOOPBACK,
        master_port=meeting.port,
        local_addr=LOOPBACK,
    )
    with (
        tempfile.TemporaryDirectory(prefix="paceline-agent-") as scratch,
        _rank_environment(),
        _quiet_agent(),
        interrupts.restored(),
        interrupts.listening() as listener,
    ):
        agent = _Agent(spec, logs_specs=DefaultLogsSpecs(log_dir=scratch), start_method="fork")
        agent.died_first = {}
        agent.interrupts = interrupts.Interrupts(listener, start.grace)
        try:
            result = agent.run()
        except SignalException as caught:
            return caught.with_traceback(None)
        ending = agent.interrupts.ending
        if ending and all(code in (-ending, 128 + ending) for code in agent.died_first.values()):
            return SignalException("the ranks ended before it was known why", ending)
        if not result.is_failed():
            return {}
        return agent.died_first or {rank: failed.exitcode for rank, failed in result.failures.items()}


class _Agent(LocalElasticAgent):
    """torch's agent, which also notes who was dead before it began to end the others, and is patient with ranks that
    were told to stop.

    Its own result names one rank only, the lowest: a killed rank 1 would show up as rank 0's lost connection. And its
    own way with signals is to send each on, also to those who got it already, and to kill what is there after 30 s.
    """

    died_first: dict[int, int]
    interrupts: interrupts.Interrupts

    def _start_workers(self, worker_group: Any) -> Any:
        pids = super()._start_workers(worker_group)
        if threading.current_thread() is threading.main_thread():
            context = self._pcontext  # not self: a cycle would keep the agent, and with it the store's port
            self.interrupts.install(lambda: _running(context))  # in place of what torch has just installed
        return pids

    def _monitor_workers(self, worker_group: Any) -> Any:
        if self.interrupts.ending:
            if self.interrupts.is_over or not _busy(self._pcontext):
                self.interrupts.kill()  # a rank whose work is done still waits for our word
                raise SignalException("the ranks had their time", self.interrupts.ending)
            return RunResult(state=WorkerState.HEALTHY)
        self.died_first = {rank: code for rank, code in _exit_codes(self._pcontext).items() if code}
        return super()._monitor_workers(worker_group)


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
def _rank_environment() -> Iterator[None]:
    """What ranks find in their environment besides torchrun's variables; this process's own is given back."""
    wanted = {environment.LAUNCHED: "1"}
    if sys.platform == "linux":
        wanted.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
