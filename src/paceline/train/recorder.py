"""Losses for the log: kept on the device as they come, reduced over the ranks and written at log points only."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.monitor.metrics import MetricsFile
from paceline.monitor.progress import Display, Standing
from paceline.runtime import collectives
from paceline.train.history import History, Record
from paceline.train.step import Finished


@dataclass
class _Pending:
    finished: Finished
    record: Record
    samples: int


class Recorder:
    def __init__(self, history: History, file: MetricsFile | None, display: Display, device: torch.device) -> None:
        self._history, self._file, self._display, self._device = history, file, display, device
        self._pending: list[_Pending] = []
        self._since = time.perf_counter()

    def step(self, finished: Finished, record: Record, samples: int) -> None:
        """Note a finished step; costs no synchronisation."""
        self._pending.append(_Pending(finished, record, samples))
        self._display.step(record["step"])

    def flush(self) -> None:
        """Reduce and write what is pending. Every rank has to come."""
        if not self._pending:
            return
        rows = [_row(pending.finished, self._device) for pending in self._pending]
        table = torch.stack(rows)
        collectives.all_reduce(table)
        samples = sum(pending.samples for pending in self._pending)
        now = time.perf_counter()
        rate = samples / (now - self._since)
        self._since = now
        for pending, (total, weight, norm) in zip(self._pending, table.tolist(), strict=True):
            pending.record["loss"] = total / weight if weight else math.nan
            if pending.finished.grad_norm is not None:
                pending.record["grad_norm"] = norm / collectives.world()  # every rank's is the whole norm
        self._write([pending.record for pending in self._pending], rate)
        self._pending = []

    def _write(self, records: list[Record], rate: float) -> None:
        self._history.steps.extend(records)
        last = records[-1]
        if self._file is not None:
            timed = {"time": round(time.time(), 3), "samples_per_second": round(rate, 2)}
            self._file.append([*records[:-1], {**last, **timed}])
        self._display.show(Standing(last["step"], last["epoch"], last["loss"], last["lr"], rate))

    def evaluation(self, record: Record) -> None:
        """Note an evaluation; its time does not count against training's speed."""
        self._since = time.perf_counter()
        self._history.evaluations.append(record)
        if self._file is not None:
            self._file.append([{"evaluation": True, **record, "time": round(time.time(), 3)}])
        self._display.note(f"step {record['step']}: evaluation loss {record['loss']:.4f}")


def _row(finished: Finished, device: torch.device) -> Any:
    norm = 0.0 if finished.grad_norm is None else finished.grad_norm
    parts = [torch.as_tensor(part, dtype=torch.float64, device=device) for part in
             (finished.loss_sum, finished.weight, norm)]  # fmt: skip
    return torch.stack(parts)
