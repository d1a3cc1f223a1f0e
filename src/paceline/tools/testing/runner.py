"""Runs a test on several gloo ranks, in a tenth of a second.

Ranks are forked from the test process, which has imported torch already, and their store is a file: no port, no
launcher, no second import. The output of ranks is shown only if the test fails.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import FileStore

from paceline.runtime import collectives, environment
from paceline.runtime.processes import before_shutdown, keep_gloo_from_preempting, run_forked

Test = TypeVar("Test", bound=Callable[..., Any])


class RankFailure(AssertionError):
    """A test failed on some rank. The text contains the traceback and the output of every rank."""


def ranks(number: int, *, timeout: float = 60.0) -> Callable[[Test], Test]:
    """Decorator that runs a test on several gloo ranks. Fixtures are created once, in the parent process.

    Args:
        number: of ranks
        timeout: seconds after which ranks are killed

    Returns:
        The decorator. The test raises `RankFailure` if it fails on any rank.

    Raises:
        RankFailure: when the test is run and fails on any rank

    Example:
        >>> @testing.ranks(2)
        ... def test_sum():
        ...     tensor = torch.ones(1)
        ...     paceline.dist.all_reduce(tensor)
        ...     assert tensor.item() == 2
        >>> test_sum()
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            run_on_ranks(number, lambda: test(*args, **kwargs), timeout=timeout)

        # pytest finds fixtures by the signature.
        on_ranks.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        return on_ranks  # type: ignore[return-value]

    return decorate


def run_on_ranks(number: int, body: Callable[[], Any], *, timeout: float = 60.0) -> None:
    """Run a function on several gloo ranks, in one process group. They are forked from this process.

    Args:
        number: of ranks
        body: the function
        timeout: seconds after which ranks are killed

    Raises:
        RankFailure: it failed on some rank; the text has the traceback and the output of every rank

    Example:
        >>> testing.run_on_ranks(2, lambda: paceline.dist.barrier())
    """
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name:
        folder = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        runs = {rank: functools.partial(_run_rank, rank, number, body, folder) for rank in range(number)}
        processes = {rank: run_forked(run) for rank, run in runs.items()}
        codes = _wait(processes, timeout)
        if any(code != 0 for code in codes.values()):
            raise RankFailure(_report(codes, folder, timeout))


def _run_rank(rank: int, number: int, body: Callable[[], Any], folder: Path) -> int:
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), write_through=True)
    # The thread pool of the parent does not exist in this process.
    torch.set_num_threads(1)
    os.environ.update(environment.variables(environment.RankInfo(rank, number, rank, number)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    try:
        before_shutdown()
        store = FileStore(str(folder / "store"), number)
        torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=timedelta(seconds=60))
        torch_dist.barrier()  # others may still be connecting, and would fail if this rank ended meanwhile
        keep_gloo_from_preempting()
        collectives.debug(True)
        body()
        if not torch_dist.is_initialized():
            raise AssertionError("the test destroyed a process group that it did not initialize")
        torch_dist.destroy_process_group()
        return 0
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"{time.time()}\n{traceback.format_exc()}")
        return 1


def _wait(processes: dict[int, int], timeout: float) -> dict[int, int | None]:
    """The exit code of each rank; None if it was killed. After a failure the other ranks get 5 s to exit."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(codes) < len(processes) and time.monotonic() < deadline:
            for rank in processes.keys() - codes.keys():
                done, status = os.waitpid(processes[rank], os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + 5.0)
            time.sleep(0.002)
    finally:  # also if the timeout of pytest interrupts the loop
        for rank in processes.keys() - codes.keys():
            os.kill(processes[rank], signal.SIGKILL)
            os.waitpid(processes[rank], 0)
            codes[rank] = None
    return codes


def _report(codes: dict[int, int | None], folder: Path, timeout: float) -> str:
    parts = []
    for rank in sorted(codes, key=lambda rank: _failure_time(folder, rank)):
        code, failed, output = codes[rank], folder / f"{rank}.failed", folder / f"{rank}.txt"
        if code == 0:
            parts.append(f"=== rank {rank}: passed")
        elif failed.exists():
            parts.append(f"=== rank {rank}: failed\n{failed.read_text().partition(chr(10))[2].rstrip()}")
        elif code is None:
            parts.append(f"=== rank {rank}: still running, killed (timeout {timeout:g} s)")
        else:
            parts.append(f"=== rank {rank}: exited with code {code}")
        text = output.read_text(errors="replace").rstrip() if output.exists() else ""
        if text:
            parts.append(f"--- output:\n{text}")
    return "\n".join(parts)


def _failure_time(folder: Path, rank: int) -> float:
    """For sorting: later failures are often consequences of the first one."""
    path = folder / f"{rank}.failed"
    return float(path.read_text().partition("\n")[0]) if path.exists() else float("inf")
