"""Statistics of each rank, in a separate file with one record per log point, and the environment of the run.

    {"time": 1760000000.123, "step": 40, "samples_per_second": 812.5, "data_wait": 0.03, "memory": …, "peak_memory": …}

On several ranks also `own_time`, the seconds of a step that this rank does not spend in collectives (stragglers.py),
and `slowdown` while the others wait for it.

At most ten records per second are written, and always the last one. Each rank writes its own file, without any
synchronization. Tools that compare ranks (stragglers, data wait time, memory) read all files.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

import paceline
from paceline.run.jsonl import JsonlWriter
from paceline.runtime import collectives, environment

SECONDS = 2.0  # that rank 0 waits for the others, which fail as soon as they notice that one did
_POLL_SECONDS = 0.01
_names = count()


class RankStats:
    SECONDS_BETWEEN = 0.1

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = JsonlWriter(path)
        self._held: dict[str, Any] | None = None
        self._next = 0.0

    def log_point(
        self, step: int, samples_per_second: float, data_wait: float, memory: int, peak_memory: int, **more: Any
    ) -> None:
        """`data_wait` is a fraction of the time since the last log point; memory is in bytes."""
        now = time.time()
        self._held = {
            "time": round(now, 3),
            "step": step,
            "samples_per_second": round(samples_per_second, 2),
            "data_wait": round(data_wait, 4),
            "memory": memory,
            "peak_memory": peak_memory,
            **more,
        }
        if now >= self._next:
            self._write()
            self._next = now + self.SECONDS_BETWEEN

    def _write(self) -> None:
        if self._held is not None:
            self._file.append([self._held])
            self._held = None

    def flush(self) -> None:
        self._write()
        self._file.flush()

    def close(self) -> None:
        self._write()
        self._file.close()


def process_memory(device: torch.device) -> tuple[int, int]:
    """Current and peak memory in bytes: of tensors on a GPU, of the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # not through Path: this runs at every log point
        pages = int(os.read(statm, 100).split()[1])
        os.close(statm)
    except OSError:  # macOS has no /proc; only the peak is known
        return peak, peak
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return resident, max(peak, resident)  # the kernel updates the peak with a delay


def describe() -> dict[str, str]:
    found = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": socket.gethostname(),
        "CPU cores": str(os.cpu_count()),
    }
    return found | _gpus()


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_initialized():  # other queries would initialize CUDA
        return {}
    found = {"GPU of rank 0": torch.cuda.get_device_name(), "GPUs of this node": str(torch.cuda.device_count())}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        with suppress(AttributeError, RuntimeError):  # a build without NCCL
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


class LastExchange:
    """One exchange. Must be created on all ranks in the same order."""

    def __init__(self) -> None:
        self._is_done = False
        self._name = f"paceline/last-records/{environment.restart_count()}/{next(_names)}"

    def exchange(self, mine: dict[str, Any], *, wait: bool) -> list[dict[str, Any]] | None:
        """On rank 0, if `wait`: the values of all ranks, or None if they do not arrive. Elsewhere None."""
        rank, ranks = collectives.rank(), collectives.world()
        if ranks == 1:
            return [mine]
        if self._is_done:  # other ranks may still read what was published first
            return None
        self._is_done = True
        try:
            store = torch_dist.distributed_c10d._get_default_store()  # there is no public way to it
            keys = [f"{self._name}/{each}" for each in range(ranks)]
            store.set(keys[rank], json.dumps(mine))
            if rank or not wait:
                return None
            deadline = time.monotonic() + SECONDS
            while not store.check(keys):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECONDS)
            return [json.loads(store.get(key)) for key in keys]
        except (RuntimeError, ValueError):  # without a process group any more, or without its store
            return None
