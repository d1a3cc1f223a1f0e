"""Ranks that several tests run on, one after the other.

`ranks` and `run_on_ranks` are used like those of `paceline.testing`, which fork new ranks for every test: each of them
needs 0.1 CPU seconds until torch, gloo and the Trainer have done everything once. Here they are forked once per worker
and wait for bodies. Each body runs in a new process group, with the output, environment, folder and warning filters of
its test, and with the random numbers and settings of torch at the fork. A body that fails, takes too long or leaves a
process or a thread behind ends the ranks, and the next one gets new ones.

They compare the first collectives of each group only, as in a training: to compare all, as new ranks do, was a quarter
of their CPU time.

A body that can't be sent to them runs on new ranks, as users' tests do: it uses `monkeypatch`, or a class of its test.
In `make test-all` all bodies do, so that no test passes only because of those before it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import io
import marshal
import math
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import FileStore
from torch._dynamo.utils import counters

import paceline
from paceline.runtime import collective_calls, collectives, environment, process_group
from paceline.runtime.processes import fork, keep_gloo_from_preempting, wait_until_idle
from paceline.tools.testing import runner
from paceline.train import standstill
from samples import ALL

_PR_SET_PDEATHSIG = 1  # Linux prctl
_CHANGING_THE_PROCESS = {"monkeypatch", "capsys", "capfd", "caplog", "recwarn"}
_MOST_BODIES = 200  # of one set of ranks: memory that bodies keep is bounded
# Seconds. Then ranks that have ended their body are killed: others may wait for the end of their connections, which is
# the end of the process for new ranks.
_ALONE = 2.0
_LAUNCH_TIMEOUT = 300.0  # tests have limits of their own
_RESULT = "result"  # the file with what rank 0 returned

fixtures: frozenset[str] = frozenset()  # of the running test; set by conftest.py


def ranks(number: int, *, timeout: float = 60.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Like `paceline.testing.ranks`."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            _run_somewhere(number, test, args, kwargs, timeout)

        on_ranks.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        return on_ranks

    return decorate


def run_on_ranks(number: int, body: Callable[[], Any], *, timeout: float = 60.0) -> None:
    """Like `paceline.testing.run_on_ranks`."""
    _run_somewhere(number, body, (), {}, timeout)


def launch(function: Callable[..., Any], *, ranks: int, **arguments: Any) -> Any:
    """Like `paceline.launch`: what the function returns on rank 0. For one that replaces nothing in its process,
    starts no run that others resume, and trains on no data set of its module: a process remembers those that it has
    read."""
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name:
        changing = ALL or fixtures & _CHANGING_THE_PROCESS
        order = None if changing else _packed(ranks, name, function, (), arguments)
        if order is None or not _know(function.__module__):
            return paceline.launch(function, ranks=ranks, **arguments)
        _require_success(_on_waiting_ranks(ranks, order, _LAUNCH_TIMEOUT), name, _LAUNCH_TIMEOUT)
        result = Path(name, _RESULT)
        return torch.load(result, weights_only=False) if result.exists() else None


def _run_somewhere(number: int, body: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name:
        order = None if ALL or fixtures & _CHANGING_THE_PROCESS else _packed(number, name, body, args, kwargs)
        if order is None or not _know(body.__module__):
            runner.run_on_ranks(number, lambda: body(*args, **kwargs), timeout=timeout)
            return
        _require_success(_on_waiting_ranks(number, order, timeout), name, timeout)


def _require_success(codes: dict[int, int | None], folder: str, timeout: float) -> None:
    if any(code != 0 for code in codes.values()):
        raise runner.RankFailure(runner._report(codes, Path(folder), timeout))


# What is sent to a rank.


@dataclass
class _Order:
    """A body: its code and what it refers to. Its globals are those of its module in the rank."""

    number: int
    folder: str
    module: str
    code: bytes
    name: str
    defaults: tuple[Any, Any]
    cells: list[Any]
    args: Any
    kwargs: Any
    variables: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    working_folder: str = field(default_factory=os.getcwd)
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))

    def run(self) -> Any:
        cells = tuple(types.CellType(value) for value in self.cells)
        names = sys.modules[self.module].__dict__
        function = types.FunctionType(marshal.loads(self.code), names, self.name, self.defaults[0], cells)
        function.__kwdefaults__ = self.defaults[1]
        return function(*self.args, **self.kwargs)


def _packed(number: int, folder: str, body: Any, args: Any, kwargs: Any) -> bytes | None:
    """None if it can't be sent."""
    if not isinstance(body, types.FunctionType) or hasattr(body, "__wrapped__"):
        return None
    try:
        cells = [cell.cell_contents for cell in body.__closure__ or ()]
        code, defaults = marshal.dumps(body.__code__), (body.__defaults__, body.__kwdefaults__)
        order = _Order(number, folder, body.__module__, code, body.__name__, defaults, cells, args, kwargs)
        return pickle.dumps(order)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        return None


# In the process of the tests.


@dataclass
class _Rank:
    process: int
    orders: int  # descriptors
    answers: int


_waiting: list[_Rank] = []
_bodies = 0  # that they have run
_modules: frozenset[str] = frozenset()  # that the first of them knows


def processes() -> frozenset[int]:
    return frozenset(rank.process for rank in _waiting)


def used() -> tuple[float, float]:
    """CPU seconds of the ranks that wait, and how many of them in the kernel."""
    user = kernel = 0
    for rank in _waiting:
        fields = Path(f"/proc/{rank.process}/stat").read_text().rpartition(")")[2].split()
        user, kernel = user + int(fields[11]) + int(fields[13]), kernel + int(fields[12]) + int(fields[14])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + kernel) / ticks, kernel / ticks


def end_ranks() -> None:
    """End the ranks that wait, whatever they do."""
    for rank in _waiting:
        os.close(rank.orders)
        os.close(rank.answers)
        _kill(rank)
    _waiting.clear()


def _kill(rank: _Rank) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(rank.process, signal.SIGKILL)
        os.waitpid(rank.process, 0)


def _know(module: str) -> bool:
    """Whether ranks that wait have imported a module; those that were forked before make room for others."""
    if _waiting and (module not in _modules or _bodies >= _MOST_BODIES):
        end_ranks()
    return module in sys.modules


def _on_waiting_ranks(number: int, order: bytes, timeout: float) -> dict[int, int | None]:
    """The exit code of each rank, 0 for one that waits again; None if it was killed. After a failure the others get
    5 s."""
    global _bodies, _modules
    if not _waiting:
        _bodies, _modules = 0, frozenset(sys.modules)
    while len(_waiting) < number:
        _waiting.append(_start(len(_waiting)))
    _bodies += 1
    codes: dict[int, int | None] = {}
    kept, first_end = 0, math.inf
    try:
        for rank in _waiting[:number]:
            _send(rank.orders, order)
        deadline = time.monotonic() + timeout
        while len(codes) < number and time.monotonic() < deadline:
            running = {_waiting[rank].answers: rank for rank in range(number) if rank not in codes}
            for descriptor in select.select(list(running), [], [], 0.1)[0]:
                rank, answer = running[descriptor], os.read(descriptor, 1)
                kept += answer == b"k"
                # An empty answer: it has exited.
                codes[rank] = {b"k": 0, b"l": 0, b"f": 1}.get(answer) if answer else _exit_code(_waiting[rank].process)
                first_end = min(first_end, time.monotonic())
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + 5.0)
            if time.monotonic() > first_end + _ALONE:
                first_end, kept = math.inf, -number
                for rank in codes.keys() - running.values():
                    _kill(_waiting[rank])
    finally:  # also if the timeout of pytest interrupts the loop
        if kept < number:
            end_ranks()
    return {rank: codes.get(rank) for rank in range(number)}


def _send(descriptor: int, order: bytes) -> None:
    with suppress(BrokenPipeError):  # it has exited, which the end of its answers says
        data = len(order).to_bytes(8) + order
        while data:
            data = data[os.write(descriptor, data) :]


def _exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) or 1


def _start(rank: int) -> _Rank:
    orders, to_rank = os.pipe()
    from_rank, answers = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    process = fork()
    if process == 0:
        try:
            for descriptor in (to_rank, from_rank):
                os.close(descriptor)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                _wait_for_bodies(rank, orders, answers)
        finally:
            # This copy of the test process must not continue with the next test.
            os._exit(1)
    os.close(orders)
    os.close(answers)
    return _Rank(process, to_rank, from_rank)


# In a rank.


class _Settings:
    """What a body may change in its process, and the next one must not see."""

    def __init__(self) -> None:
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.dtype, self.modules, self.path = torch.get_default_dtype(), set(sys.modules), list(sys.path)
        self.argv, self.hook = list(sys.argv), sys.excepthook
        self.handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def restore(self, order: _Order, rank: int) -> None:
        os.environ.clear()
        info = environment.RankInfo(rank, order.number, rank, order.number)
        os.environ.update({**order.variables, **environment.variables(info)})
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        os.chdir(order.working_folder)
        warnings.filters[:] = order.filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])
        torch.set_rng_state(self.random[2])
        torch.set_num_threads(1)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        sys.path[:], sys.argv, sys.excepthook = self.path, list(self.argv), self.hook
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        process_group.forget()
        counters.clear()  # a process that has compiled a model counts no FLOPs


def _wait_for_bodies(rank: int, orders: int, answers: int) -> None:
    settings = _Settings()
    threads = {thread.ident for thread in threading.enumerate()}
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), write_through=True)
    with os.fdopen(orders, "rb") as pipe:
        while head := pipe.read(8):
            order = pickle.loads(pipe.read(int.from_bytes(head)))  # noqa: S301 - of the process that forked this one
            output = os.open(f"{order.folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            passed = _run_body(settings, order, rank)
            left = multiprocessing.active_children() or {one.ident for one in threading.enumerate()} - threads
            os.write(answers, b"f" if not passed else b"l" if left else b"k")
            if not passed or left:
                signal.pause()  # until it is killed


def _run_body(settings: _Settings, order: _Order, rank: int) -> bool:
    try:
        settings.restore(order, rank)
        store = FileStore(f"{order.folder}/store", order.number)
        seconds = timedelta(seconds=60)
        torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=order.number, timeout=seconds)
        torch_dist.barrier()
        keep_gloo_from_preempting()
        collectives.debug(environment.debug_enabled())
        collective_calls._calls.clear()
        result = order.run()
        if result is not None and rank == 0:
            torch.save(result, f"{order.folder}/{_RESULT}")
        del result
        if not torch_dist.is_initialized():
            raise AssertionError("the test destroyed a process group that it did not initialize")
        standstill.end()
        order.args = order.kwargs = order.cells = None
        gc.collect()  # a model holds the group: its last reference must not go while gloo's threads work
        wait_until_idle()
        collectives.debug(False)
        torch_dist.destroy_process_group()
        return True
    except BaseException:
        Path(order.folder, f"{rank}.failed").write_text(f"{time.time()}\n{traceback.format_exc()}")
        return False
