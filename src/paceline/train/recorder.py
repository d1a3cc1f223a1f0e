"""Losses for the log: kept on the device as they come, reduced over the ranks and written at log points only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.monitor.events import RankEvents, process_memory
from paceline.monitor.loggers import Logger
from paceline.monitor.metrics import MetricsFile
from paceline.monitor.progress import Display, Standing
from paceline.runtime import collectives
from paceline.train.callbacks import Callbacks
from paceline.train.history import History, Record


class Pending(NamedTuple):
    """A finished step whose numbers are still on the device."""

    step: int
    epoch: int
    lr: float
    samples: int  # over all ranks
    parts: Sequence[tuple[Tensor, Any]]  # (mean, samples) or (sum, weight) of this rank's micro-batches
    means: bool
    norm: Tensor | None
    skipped: Tensor | float | None


@dataclass
class Sinks:
    """Where records go: rank 0's file and loggers, every rank's own events."""

    metrics: MetricsFile | None = None
    events: RankEvents | None = None
    loggers: Sequence[Logger] = ()

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self.metrics is not None:
            self.metrics.append(records)
        for logger in self.loggers:
            logger.write(records)

    def release(self) -> None:
        """Close the files until the next record: who loops outside need not tell when it is over."""
        for file in (self.metrics, self.events):
            if file is not None:
                file.close()

    def close(self) -> None:
        self.release()
        for logger in self.loggers:
            logger.close()


@dataclass(frozen=True)
class Flushed:
    """What a log point found, equal on every rank."""

    records: Sequence[Record] = ()
    stop: bool = False  # some rank wishes to
    nonfinite: Record | None = None  # the first step whose loss or gradient was no finite number


class Recorder:
    def __init__(
        self,
        history: History,
        sinks: Sinks,
        display: Display,
        device: torch.device,
        callbacks: Callbacks,
        is_bad: Callable[[Record], bool],
    ) -> None:
        self._history, self._sinks, self._display, self._device = history, sinks, display, device
        self._callbacks, self._is_bad = callbacks, is_bad
        self.pending: list[Pending] = []
        self.waited = 0.0  # seconds spent waiting for data since the last log point
        self.tokens_per_sample: int | None = None
        self.stop_wished = False  # by this rank; what all ranks wish is known at the next log point
        self._logged: dict[str, list[tuple[Any, Any]]] = {}
        self._since = time.perf_counter()

    def log(self, name: str, value: Any, weight: Any = 1.0) -> None:
        """Keep a value for the next log point, where its weighted mean over steps and ranks is written."""
        kept = value.detach() if isinstance(value, Tensor) else float(value)
        self._logged.setdefault(name, []).append((kept, weight))

    def log_metrics(self, metrics: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
        for values, weight in metrics:
            for name, value in values.items():
                self.log(name, value, weight)

    def flush(self) -> Flushed:
        """Reduce and write what is pending. Every rank has to come."""
        if not self.pending:
            return Flushed()
        pending, self.pending[:] = list(self.pending), []
        count = len(pending)
        numbers = _numbers(pending, len(self._logged), self.stop_wished, self._device)
        collectives.all_reduce(numbers)
        values = numbers.tolist()
        extras = self._reduce_logged() if values[4 * count] else {}
        records = _records(pending, values, collectives.world())
        records[-1].update(extras)
        self._write(records, sum(entry.samples for entry in pending), extras)
        weights = values[count : 2 * count]
        bad = [record for record, weight in zip(records, weights, strict=True) if weight and self._is_bad(record)]
        return Flushed(records, bool(values[4 * count + 1]), bad[0] if bad else None)

    def _reduce_logged(self) -> dict[str, float]:
        own = {
            name: [float(sum(value * weight for value, weight in pairs)), float(sum(weight for _, weight in pairs))]
            for name, pairs in self._logged.items()
        }
        self._logged = {}
        sums: dict[str, list[float]] = {}
        for rank in collectives.all_gather_object(own):
            for name, (total, weight) in rank.items():
                before = sums.setdefault(name, [0.0, 0.0])
                before[0], before[1] = before[0] + total, before[1] + weight
        return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}

    def _write(self, records: list[Record], samples: int, extras: Mapping[str, float]) -> None:
        now = time.perf_counter()
        seconds = now - self._since
        rate, wait = samples / seconds, min(1.0, self.waited / seconds)
        self._since, self.waited = now, 0.0
        self._history.steps.extend(records)
        last = records[-1]
        timed = {"time": round(time.time(), 3), "samples_per_second": round(rate, 2)}
        self._sinks.write([*records[:-1], {**last, **timed}])
        memory = None
        if self._sinks.events is not None:
            memory, peak = process_memory(self._device)
            self._sinks.events.log_point(last["step"], rate, wait, memory, peak)
        tokens = None if self.tokens_per_sample is None else rate * self.tokens_per_sample
        standing = Standing(last["step"], last["epoch"], last["loss"], last["lr"], rate, tokens, wait, memory, extras)
        self._display.show(standing)
        self._callbacks.call("on_log", last)

    def flush_alone(self) -> None:
        """An exception ends training: write what this rank knows, since the others may not come."""
        if not self.pending:
            return
        pending, self.pending[:] = list(self.pending), []
        values = _numbers(pending, 0, False, self._device).tolist()
        records = _records(pending, values, ranks=1)
        if collectives.world() > 1:
            records = [{**record, "of_rank": collectives.rank()} for record in records]
        self._history.steps.extend(records)
        self._sinks.write(records)

    def evaluation(self, record: Record) -> None:
        """Note an evaluation; its time does not count against training's speed."""
        self._history.evaluations.append(record)
        self._sinks.write([{"evaluation": True, **record, "time": round(time.time(), 3)}])
        others = "".join(
            f", {name} {value:.4f}" for name, value in record.items() if name not in ("step", "epoch", "loss")
        )
        self._display.note(f"step {record['step']}: evaluation loss {record['loss']:.4f}{others}")
        self._callbacks.call("on_evaluate", record)

    def release(self) -> None:
        self._sinks.release()

    def note(self, text: str) -> None:
        self._display.note(text)

    def pause_over(self) -> None:
        """The time since the last log point was not training's."""
        self._since, self.waited = time.perf_counter(), 0.0


def _numbers(pending: Sequence[Pending], logged: int, stop: bool, device: torch.device) -> Tensor:
    """Sums, weights, norms and skips of each step, then how many values were logged and whether to stop: one vector,
    for one collective and one look at the device."""
    sums, weights = _sums_and_weights(pending, device)
    norms = _vector([entry.norm for entry in pending], device)
    skips = _vector([entry.skipped for entry in pending], device)
    return torch.cat([sums, weights, norms, skips, _vector([float(logged), float(stop)], device)])


def _sums_and_weights(pending: Sequence[Pending], device: torch.device) -> tuple[Tensor, Tensor]:
    values = _vector([value for entry in pending for value, _ in entry.parts], device)
    weights = _vector([weight for entry in pending for _, weight in entry.parts], device)
    means = _vector([float(entry.means) for entry in pending for _ in entry.parts], device)
    # A stand-in's mean weighs nothing, whatever it is.
    sums = torch.where(weights > 0, values * torch.where(means > 0, weights, 1.0), 0.0)
    if len(values) == len(pending):
        return sums, weights
    steps = [number for number, entry in enumerate(pending) for _ in entry.parts]
    index = torch.tensor(steps, device=device)
    empty = torch.zeros(len(pending), dtype=torch.float64, device=device)
    return empty.index_add(0, index, sums), empty.index_add(0, index, weights)


def _vector(values: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, tensors and None (as 0) in float64."""
    kinds = set(map(type, values))
    if Tensor not in kinds:
        return torch.tensor([value or 0.0 for value in values], dtype=torch.float64, device=device)
    if kinds != {Tensor} or len({value.dtype for value in values}) > 1:
        values = [torch.as_tensor(value or 0.0 if not isinstance(value, Tensor) else value) for value in values]
        values = [value.reshape(()).to(device, torch.float64) for value in values]
    return torch.stack(list(values)).to(device, torch.float64)


def _records(pending: Sequence[Pending], values: Sequence[float], ranks: int) -> list[Record]:
    count = len(pending)
    sums, weights, norms, skips = (values[part * count : (part + 1) * count] for part in range(4))
    records = []
    for entry, total, weight, norm, skipped in zip(pending, sums, weights, norms, skips, strict=True):
        record = {
            "step": entry.step,
            "epoch": entry.epoch,
            "loss": total / weight if weight else math.nan,
            "lr": entry.lr,
        }
        if entry.norm is not None:
            record["grad_norm"] = norm / ranks  # every rank's is the whole norm
        if skipped:
            record["skipped"] = True
        records.append(record)
    return records
