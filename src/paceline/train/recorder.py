"""Recorded losses: kept on the device, reduced over ranks and written at log points only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from paceline.log import Log
from paceline.models.losses import Loss, means_of, weighted_means
from paceline.models.metrics import require_number
from paceline.monitor.loggers import GuardedLogger
from paceline.monitor.progress_bar import Display, LogPoint
from paceline.monitor.rank_stats import LastExchange, RankStats, process_memory
from paceline.monitor.stragglers import BusyTime
from paceline.plan.slow_input import InputSource, Interval
from paceline.run.folder import RunFolder
from paceline.run.history import History, Record, require_free_names
from paceline.run.jsonl import JsonlWriter
from paceline.runtime import collectives
from paceline.text import format_value
from paceline.train.callbacks import Callbacks
from paceline.train.checks.same_model import ReplicaCheck
from paceline.train.throughput import Throughput

Sums = Mapping[str, Sequence[float]]  # over all ranks, of what the parts of a log point measure
_MEMORY_INTERVAL = 0.5  # seconds between reads of process memory, each of which costs as much as a record

# A finished step whose values are still on the device: (step, epoch, learning rate, samples over all ranks, parts,
# whether parts are means, gradient norm, skipped), where parts are (mean, samples) or (sum, weight) of this rank's
# micro-batches. A plain tuple, because one is created in every step.
Pending = tuple[int, int, float, int, Sequence[tuple[Tensor, Any]], bool, Tensor | None, Tensor | float | None]


@dataclass
class Sinks:
    """Destinations of records: the metrics file and loggers of rank 0, and the statistics file of every rank."""

    metrics: JsonlWriter | None = None
    events: RankStats | None = None
    loggers: Sequence[GuardedLogger] = ()
    media: JsonlWriter | None = None  # None on other ranks, without a run folder, and when training has ended

    def write(self, records: Sequence[Mapping[str, Any]], *, loggers: bool = True) -> None:
        if self.metrics is not None:
            self.metrics.append(records)
        for logger in self.loggers if loggers else ():
            logger.write(records)

    def write_media(self, kind: str, name: str, value: Any, step: int) -> None:
        if self.media is not None:
            from paceline.monitor import media  # few runs need it

            record = media.record(RunFolder(self.media.path.parent), kind, name, value, step)
            self.media.append([record])
            self.media.flush()
            for logger in self.loggers:
                logger.write_media(record)

    def flush(self) -> None:
        """Pass all records to the operating system."""
        for file in (self.metrics, self.events):
            if file is not None:
                file.flush()

    def close(self) -> None:
        for file in (self.metrics, self.events, self.media):
            if file is not None:
                file.close()
        self.media = None
        for logger in self.loggers:
            logger.close()


@dataclass(frozen=True)
class Flushed:
    """Result of a log point, equal on every rank."""

    records: Sequence[Record] = ()
    stop: bool = False  # requested on any rank
    nonfinite: Record | None = None  # the first step with a non-finite loss or gradient
    seen_here: bool = False  # whether the loss of this rank in that step was not finite


class Recorder:
    def __init__(
        self,
        history: History,
        sinks: Sinks,
        display: Display,
        device: torch.device,
        callbacks: Callbacks,
        is_bad: Callable[[Record], bool],
        log: Log,
        replicas: ReplicaCheck | None,
        rates: Throughput | None = None,
    ) -> None:
        self._history, self._sinks, self.display, self._device = history, sinks, display, device
        self._callbacks, self._is_bad, self._log, self._replicas = callbacks, is_bad, log, replicas
        self._rates = rates
        self._traffic = None if rates is None else rates.traffic
        self.own_time: BusyTime | None = None  # None: one rank, or a custom loop
        self.pending: list[Pending] = []
        self.waited = 0.0  # seconds spent waiting for data since the last log point
        self._waited_before = 0.0
        self.tokens_per_sample: int | None = None
        self.stop_requested = False  # on this rank; combined over ranks at the next log point
        self._ranks = collectives.world()
        self._last = LastExchange()
        self._logged: dict[str, list[tuple[Any, Any, Any]]] = {}  # (value, factor, weight): Σ value × factor / Σ weight
        self._since = time.perf_counter()
        self._memory, self._memory_read = (0, 0), -math.inf

    def log(self, name: str, value: Any, weight: Any = 1.0) -> None:
        """Keep a value for the next log point, which writes its weighted mean over steps and ranks."""
        factor = weight
        if isinstance(value, Loss):
            value, factor, weight = value.sum, 1.0, value.weight
        value = require_number(name, value)
        kept = value.detach().reshape(()) if isinstance(value, Tensor) else value
        self._logged.setdefault(name, []).append((kept, factor, weight))

    def log_metrics(self, metrics: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
        for values, weight in metrics:
            require_free_names(values, "The model's metrics")
            for name, value in values.items():
                self.log(name, value, weight)

    def flush(self) -> Flushed:
        """Reduce and write pending records. Collective: must be called on every rank."""
        if not self.pending:
            return Flushed()
        pending = list(self.pending)
        count, replicas = len(pending), self._replicas
        digest = None if replicas is None else replicas.digest()  # before the device is synchronized
        began = time.perf_counter()
        values = [*_numbers(pending, self._device), float(len(self._logged)), float(self.stop_requested)]
        own = self._interval(began, count)
        measured = {} if self._rates is None else self._rates.own(own)
        if replicas is not None:
            measured["replicas"] = replicas.shares(digest)
        values += chain.from_iterable(measured.values())
        losses = values[:count]
        if self._ranks > 1:
            numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
            collectives.all_reduce(numbers)
            if self._traffic is not None:
                self._traffic.all_reduce(numbers.nbytes, self._ranks)
            values = numbers.tolist()
        extras = weighted_means(self._logged_sums()) if values[4 * count] else {}
        del self.pending[:count]  # now that all ranks have them: if one has died, `flush_last` writes them
        self._logged = {}
        records = _records(pending, values, self._ranks)
        records[-1].update(extras)
        rest = iter(values[4 * count + 2 :])
        sums = {name: list(islice(rest, len(numbers))) for name, numbers in measured.items()}
        self._write(records, own, sum([entry[3] for entry in pending]), extras, sums)
        if replicas is not None:
            replicas.finish(sums["replicas"], pending[-1][0], finite=math.isfinite(sum(values)))
        bad = self._first_bad(records, values)
        seen_here = bad is not None and not math.isfinite(losses[records.index(bad)])
        return Flushed(records, bool(values[4 * count + 1]), bad, seen_here)

    def finish(self) -> None:
        """Training has ended."""
        if self._rates is not None:
            self._rates.finish()

    def check_replicas(self, step: int) -> None:
        """Compare all weights of replicas after the last step. Collective: must be called on every rank."""
        if self._replicas is not None:
            self._replicas.check_all(step)

    def _first_bad(self, records: Sequence[Record], values: Sequence[float]) -> Record | None:
        """The first record with a non-finite loss or norm. Steps of weight zero have no loss."""
        if math.isfinite(sum(values)):
            return None
        weights = values[len(records) : 2 * len(records)]
        bad = (record for record, weight in zip(records, weights, strict=True) if weight and self._is_bad(record))
        return next(bad, None)

    def _logged_sums(self) -> dict[str, list[float]]:
        return {
            name: [float(sum(value * factor for value, factor, _ in kept)), float(sum(weight for *_, weight in kept))]
            for name, kept in self._logged.items()
        }

    def _interval(self, began: float, steps: int) -> Interval:
        """The time since the last log point; the values of this one were read from `began` until now."""
        now = time.perf_counter()
        return Interval(now - self._since, steps, self.waited, 0.0 if self._device.type == "cpu" else now - began)

    def _write(
        self, records: list[Record], own: Interval, samples: int, extras: Mapping[str, float], sums: Sums
    ) -> None:
        now = time.perf_counter()
        rate = samples / (now - self._since)
        self._waited_before += self.waited
        self._since, self.waited = now, 0.0
        self._history.steps.extend(records)
        last = records[-1]
        sent = {} if self._traffic is None or self._rates is None else self._rates.sent(sums, own.steps)
        if sent:
            last.update({name: value for name, value in sent.items() if name not in last})
        rates = {} if self._rates is None else self._rates.combine(sums, rate, own, last["step"])
        timed = {"time": round(time.time(), 3), "samples_per_second": round(rate, 2)}
        self._sinks.write([*records[:-1], last | rates | last | timed])  # the user may have logged an mfu
        memory = None
        if self._sinks.events is not None:
            if now > self._memory_read + _MEMORY_INTERVAL:
                self._memory, self._memory_read = process_memory(self._device), now
            memory, peak = self._memory
            more = {} if self._rates is None else self._rates.of_rank()
            self._sinks.events.log_point(last["step"], rate, own.data_wait, memory, peak, **more)
        tokens = None if self.tokens_per_sample is None else rate * self.tokens_per_sample
        speed = (rate, tokens, rates.get("data_wait", own.data_wait))
        slow = "" if self._rates is None or self._rates.stragglers is None else self._rates.stragglers.shown()
        shown = (rates.get("tflops_per_device"), rates.get("mfu"), sent.get("sent_mb"))
        self.display.show(
            LogPoint(last["step"], last["epoch"], last["loss"], last["lr"], *speed, memory, extras, *shown, slow)
        )
        self._callbacks.call("on_log", last)
        if self.own_time is not None:
            self.own_time.resume()

    def flush_last(self) -> bool:
        """Write pending records where ranks may be gone: after an exception, or when a custom loop ends. Returns
        whether they are records of all ranks; if not, they are marked with `of_rank`."""
        pending = list(self.pending)
        steps = [entry[0] for entry in pending]
        values = _numbers(pending, self._device) if pending else []
        mine: dict[str, Any] = {"steps": steps, "values": values, "logged": self._logged_sums()}
        del self.pending[:]
        self._logged = {}
        ranks = self._last.exchange(mine, wait=bool(pending))
        if not pending:
            return True
        is_complete = ranks is not None and all(each["steps"] == steps for each in ranks)
        given = ranks if ranks is not None and is_complete else [mine]
        values = [sum(numbers) for numbers in zip(*(each["values"] for each in given), strict=True)]
        records = _records(pending, values, ranks=len(given))
        records[-1].update(means_of([each["logged"] for each in given]))
        if not is_complete:
            records = [{**record, "of_rank": collectives.rank()} for record in records]
        self._history.steps.extend(records)
        self._sinks.write(records, loggers=is_complete)
        return is_complete

    def try_flush_last(self) -> bool:
        """Write pending records after an exception, which must not be hidden by another one."""
        try:
            return self.flush_last()
        except Exception as second:
            self._log.warning(f"the last records were not written: {type(second).__name__}: {second}")
            return False

    def evaluation(self, record: Record) -> None:
        """Record an evaluation."""
        self._history.evaluations.append(record)
        self._sinks.write([{"evaluation": True, **record, "time": round(time.time(), 3)}])
        shown = [f"{name} {format_value(value)}" for name, value in record.items() if name not in ("step", "epoch")]
        self._log.info(f"step {record['step']}: validation {', '.join(shown)}")  # its loss comes first
        self._callbacks.call("on_evaluate", record)

    @property
    def waited_in_all(self) -> float:
        """Seconds for data since this call of train() began."""
        return self._waited_before + self.waited

    def write_out(self) -> None:
        """A custom loop may end after any step."""
        self._sinks.flush()

    def note(self, text: str | None) -> None:
        if text:
            self._log.info(text)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of this context from training throughput."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began
        if self.own_time is not None:
            self.own_time.resume()

    def begin(self, source: InputSource | None = None, groups: int = 1) -> None:
        """Start measuring throughput. `source`: where batches, of `groups` micro-batches, come from."""
        self._since, self.waited = time.perf_counter(), 0.0
        if self._rates is not None:
            self._rates.begin(source, groups)
            self.own_time = None if source is None else self._rates.own_time


def _numbers(pending: Sequence[Pending], device: torch.device) -> list[float]:
    """This rank's loss sums, weights, gradient norms and skip flags of each step, concatenated."""
    number = _reader(pending, device)
    rows: list[tuple[float, ...]] = []
    for *_, parts, means, norm, skipped in pending:
        total = count = 0.0
        for value, part_weight in parts:
            weight = number(part_weight) if type(part_weight) is Tensor else part_weight
            if weight:  # a placeholder batch has weight zero, whatever its loss is
                total += number(value) * weight if means else number(value)
                count += weight
        skip = number(skipped) if isinstance(skipped, Tensor) else skipped or 0.0
        rows.append((total, count, 0.0 if norm is None else number(norm), skip))
    return list(chain.from_iterable(zip(*rows, strict=True)))


def _reader(pending: Sequence[Pending], device: torch.device) -> Callable[[Tensor], float]:
    """Return a function that reads a tensor's value. GPU values are all read here, with one synchronization."""
    if device.type == "cpu":
        return Tensor.item
    everything = [part for entry in pending for pair in entry[4] for part in pair]
    everything += [value for entry in pending for value in entry[6:]]
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in everything:
        if type(value) is Tensor:
            kinds.setdefault((value.device, value.dtype), []).append(value)
    stacked = [torch.stack([value.reshape(()) for value in same]).to(device, torch.float64) for same in kinds.values()]
    known = dict(zip(map(id, chain(*kinds.values())), torch.cat(stacked).tolist(), strict=True)) if stacked else {}
    return lambda tensor: known[id(tensor)]


def _records(pending: Sequence[Pending], values: Sequence[float], ranks: int) -> list[Record]:
    count = len(pending)
    sums, weights, norms, skips = (values[part * count : (part + 1) * count] for part in range(4))
    records = []
    for entry, total, weight, norm, skipped in zip(pending, sums, weights, norms, skips, strict=True):
        loss = total / weight if weight else math.nan
        record: Record = {"step": entry[0], "epoch": entry[1], "loss": loss, "lr": entry[2]}
        if entry[6] is not None:
            record["grad_norm"] = norm / ranks  # every rank has the global norm
        if skipped:
            record["skipped"] = True
        records.append(record)
    return records
