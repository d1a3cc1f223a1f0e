"""Statistics of each rank, in a separate file with one record per log point.

    {"time": 1760000000.123, "step": 40, "samples_per_second": 812.5, "data_wait": 0.03, "memory": …, "peak_memory": …}

On several ranks also `own_time`, the seconds of a step that this rank does not spend in collectives (stragglers.py),
and `slowdown` while the others wait for it.

At most ten records per second are written, and always the last one. Each rank writes its own file, without any
synchronization. Tools that compare ranks (stragglers, data wait time, memory) read all files.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.run.jsonl import JsonlWriter


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
