"""Measures in workers how long reading a micro-batch takes. The sums of each worker are in shared memory, where the
training process reads them at log points."""

from __future__ import annotations

from multiprocessing.sharedctypes import RawArray
from time import perf_counter
from typing import Any

from torch.utils.data import Dataset, get_worker_info


class TimedReading(Dataset[Any]):
    """A dataset of batches for torch's loader, in `workers` processes."""

    def __init__(self, dataset: Any, workers: int) -> None:
        self._dataset = dataset
        self._sums = RawArray("d", 2 * workers)  # seconds and batches of each worker, which alone writes them

    def __getitems__(self, keys: Any) -> Any:
        began = perf_counter()
        batch = self._dataset.__getitems__(keys)
        worker = get_worker_info()
        if worker is not None:
            self._sums[2 * worker.id] += perf_counter() - began
            self._sums[2 * worker.id + 1] += 1.0
        return batch

    def read(self) -> tuple[float, float]:
        """Seconds and batches so far, of all workers."""
        sums = list(self._sums)
        return sum(sums[::2]), sum(sums[1::2])

    def __getattr__(self, name: str) -> Any:
        """A `worker_init_fn` may access attributes of the user's dataset."""
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)
