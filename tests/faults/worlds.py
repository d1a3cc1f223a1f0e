"""Worlds that end badly: ranks as forked processes, of which some are killed, and what each of them came to.

    ended = run(2, body)
    ended[0].code, ended[0].error        # "world.different-calls", its text; or ended[0].value, what body returned
    ended[1].status                      # -9

Unlike `paceline.testing`, a rank that fails is no failed test, and the others are not ended for it: they have the whole
deadline to end by themselves.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import FileStore

from paceline.errors import PacelineError
from paceline.runtime import environment

DEADLINE = 60.0  # seconds in which every rank of a broken world has to end


@dataclass(frozen=True)
class Ended:
    """How a rank ended; `status` is negative for a signal, and None where it had to be ended."""

    status: int | None
    value: Any = None
    error: str = ""
    kind: str = ""  # of the exception
    code: str = ""  # where it has one
    output: str = ""


def run(number: int, body: Callable[[], Any], deadline: float = DEADLINE) -> list[Ended]:
    """Run `body`, whose result has to be JSON, on that many ranks that are forked from this process."""
    with tempfile.TemporaryDirectory(prefix="paceline-worlds-") as name:
        folder = Path(name)
        processes = [_fork(rank, number, body, folder) for rank in range(number)]
        statuses = _wait(processes, deadline)
        return [_ended(statuses[process], folder / str(rank)) for rank, process in enumerate(processes)]


def values(number: int, body: Callable[[], Any]) -> list[Any]:
    """What `body` returns on each rank of a world in which nothing goes wrong."""
    ended = run(number, body)
    for rank, each in enumerate(ended):
        assert each.status == 0, f"rank {rank} ended with {each.status}:\n{each.error}\n{each.output}"
    return [each.value for each in ended]


def _fork(rank: int, number: int, body: Callable[[], Any], folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        try:
            _be_rank(rank, number, body, folder)
        finally:
            os._exit(1)
    return process


def _be_rank(rank: int, number: int, body: Callable[[], Any], folder: Path) -> None:
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), write_through=True)
    torch.set_num_threads(1)
    os.environ.update(environment.variables(environment.RankInfo(rank, number, rank, number)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    told: dict[str, Any] = {}
    try:
        if number > 1:
            store = FileStore(str(folder / "store"), number)
            limit = timedelta(seconds=DEADLINE / 2)
            torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=limit)
        told["value"] = body()
        if number > 1:
            torch_dist.destroy_process_group()
    except BaseException as error:
        told["error"] = "".join(traceback.format_exception(error))
        told["kind"] = type(error).__name__
        told["code"] = error.code if isinstance(error, PacelineError) else ""
    (folder / str(rank)).write_text(json.dumps(told))
    os._exit("error" in told)


def _wait(processes: list[int], deadline: float) -> dict[int, int | None]:
    statuses: dict[int, int | None] = {}
    until = time.monotonic() + deadline
    try:
        while len(statuses) < len(processes) and time.monotonic() < until:
            for process in set(processes) - statuses.keys():
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    statuses[process] = os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
    finally:
        for process in set(processes) - statuses.keys():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            statuses[process] = None
    return statuses


def _ended(status: int | None, path: Path) -> Ended:
    told = json.loads(path.read_text()) if path.exists() else {}
    return Ended(status, **told, output=path.with_suffix(".txt").read_text(errors="replace"))
