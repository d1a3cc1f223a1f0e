"""The metrics of a run as numbers by step, with 16 bytes per number."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from statistics import median
from typing import Any

from paceline.config.components import smaller_is_better
from paceline.run.folder import RunFolder
from paceline.run.history import RESERVED
from paceline.run.jsonl import Record, RecordStream
from paceline.text import plural

_MAX_STEP = 1 << 53
_MAX_METRICS = 20  # of evaluations
_MAX_SERIES = 100  # of steps
TAIL_BYTES = 1 << 18  # enough for the last step, loss and speed

Metric = tuple[str, str | None]  # of save_best: its name, and its mode if the recipe sets one
ANY_METRIC: Metric = ("", None)
_NOT_METRICS = RESERVED - {"loss"}
_NOT_SERIES = {"step", "epoch", "evaluation", "of_rank"}
Curve = dict[str, list[float | None]]
DIGITS, TIME_DIGITS = 8, 14  # significant ones, more than a page shows; times are seconds since 1970


@dataclass
class MetricSeries:
    """Values by step, in increasing order of steps. Values that are not finite are nan."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    rewinds: int = 0  # how often values were replaced, because the run resumed from an earlier step

    def append(self, step: int, value: object) -> None:
        self.rewinds += bool(self.steps) and self.steps[-1] >= step
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(number(value))

    def extend(self, steps: list[int], values: list[object]) -> None:
        """`append` for many, which is much cheaper where all is in order."""
        after = self.steps[-1] if self.steps else -1
        in_order = all(map(lt, [after, *steps], steps))
        if in_order and set(map(type, values)) <= {float} and all(map(math.isfinite, values)):  # type: ignore[arg-type]
            self.steps.extend(steps)
            self.values.extend(values)  # type: ignore[arg-type]
        else:
            for step, value in zip(steps, values, strict=True):
                self.append(step, value)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first(self) -> float | None:
        return self.values[0] if self.values else None

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def at(self, step: int) -> float | None:
        """The value at a step, or at the last one before it."""
        number = bisect_right(self.steps, step)
        return self.values[number - 1] if number else None

    def best(self, metric: str, chosen: Metric = ANY_METRIC) -> tuple[int, float] | None:
        """The step and the value of the best one: the lowest or the highest, as for save_best."""
        first = next((number for number, value in enumerate(self.values) if not math.isnan(value)), None)
        if first is None:
            return None
        mode = chosen[1] if metric == chosen[0] else None
        choose = min if mode == "min" or (mode is None and smaller_is_better(metric)) else max
        best = self.values.index(choose(self.values[first:]))  # a nan that is not the first one is never chosen
        return self.steps[best], self.values[best]


@dataclass
class RunMetrics:
    """What the records of a run contain."""

    series: dict[str, MetricSeries] = field(default_factory=dict)  # of steps, by the name in a record
    evaluations: dict[str, MetricSeries] = field(default_factory=dict)
    epoch: int | None = None
    without_step: int = 0  # records
    problems: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> MetricSeries:
        return self.series.get(name, MetricSeries())

    @property
    def step(self) -> int | None:
        return max((each.steps[-1] for each in (self["loss"], *self.evaluations.values()) if each.steps), default=None)

    @property
    def speed(self) -> tuple[float, str] | None:
        """The last one, and its unit."""
        if speeds := self["samples_per_second"]:
            return speeds.values[-1], "samples/s"
        times = self["time"]
        seconds = times.values[-1] - times.values[-2] if len(times) > 1 else 0.0
        return ((times.steps[-1] - times.steps[-2]) / seconds, "steps/s") if seconds > 0 else None

    @property
    def median_speed(self) -> float | None:
        """In samples per second."""
        finite = [value for value in self["samples_per_second"].values if math.isfinite(value)]
        return median(finite) if finite else None

    @property
    def skipped_steps(self) -> int:
        return len(self["skipped"])

    @property
    def rewinds(self) -> int:
        return sum(each.rewinds for each in (*self.series.values(), *self.evaluations.values()))

    def extend(self, stream: RecordStream, *, to_end: bool = False) -> None:
        """Append what is new in the metrics file; `to_end`: also a last line without a line break."""
        name, self.problems = stream.name, []
        try:
            for records in stream:
                self._add(records)
        except FileNotFoundError:
            self.problems.append(f"{name} is missing: no metrics")
        except OSError as error:
            self.problems.append(f"{name} can't be read: {error.strerror}")
        if to_end:
            self._add(stream.rest())
        if len(self.series) >= _MAX_SERIES or len(self.evaluations) >= _MAX_METRICS:
            limits = f"{_MAX_SERIES} metrics of steps and {_MAX_METRICS} of evaluations"
            self.problems.append(f"only the first {limits} in {name} are shown")
        if unreadable := stream.unreadable + self.without_step:
            self.problems.append(f"{plural(unreadable, 'unreadable line')} in {name}")

    def _add(self, records: list[Record]) -> None:
        usable = [each for each in records if type(step := each.get("step")) is int and 0 <= step < _MAX_STEP]
        self.without_step += len(records) - len(usable)
        _add_steps(self, [record for record in usable if not record.get("evaluation")])
        for record in usable:
            for name, value in record.items() if record.get("evaluation") else ():
                is_known = name in self.evaluations or len(self.evaluations) < _MAX_METRICS
                if is_known and name not in _NOT_METRICS and not isinstance(value, (str, bool, list, dict)):
                    self.evaluations.setdefault(name, MetricSeries()).append(record["step"], value)


def read_metrics(folder: RunFolder, last_bytes: int | None = None) -> RunMetrics:
    """The metrics in the file of a run, or in its last bytes."""
    metrics = RunMetrics()
    stream = RecordStream(folder.metrics) if last_bytes is None else RecordStream(folder.metrics, last_bytes)
    metrics.extend(stream, to_end=True)
    if stream.skipped_bytes and last_bytes is None:
        metrics.problems.append(f"the first {stream.skipped_bytes >> 20} MiB of {folder.metrics.name} were not read")
    return metrics


def _add_steps(metrics: RunMetrics, records: list[Record]) -> None:
    names = dict.fromkeys(["loss", *(name for keys in set(map(tuple, records)) for name in keys)])
    for name in names:
        if name in _NOT_SERIES or (name not in metrics.series and len(metrics.series) >= _MAX_SERIES):
            continue
        having = [record for record in records if name in record]
        if name not in RESERVED and any(isinstance(record[name], (str, bool, list, dict)) for record in having[:1]):
            continue
        steps = [record["step"] for record in having]
        values = [1.0] * len(steps) if name == "skipped" else [record[name] for record in having]
        metrics.series.setdefault(name, MetricSeries()).extend(steps, values)
    epoch = records[-1].get("epoch") if records else None
    metrics.epoch = epoch if isinstance(epoch, int) else metrics.epoch


def number(value: object) -> float:
    """nan for anything else, and for null, which writers use for nan and infinity."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    return float(value) if type(value) is int and abs(value) < _MAX_STEP else math.nan


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def thin(series: MetricSeries, low: int, high: int, buckets: int, digits: int = DIGITS) -> Curve:
    """The values of the steps from `low` to `high`, with the last one before and the first one after them, so that a
    line can be drawn to the edges."""
    first = max(0, bisect_left(series.steps, low) - 1)
    last = min(len(series), bisect_right(series.steps, high) + 1)
    return thin_points(series.steps[first:last], series.values[first:last], buckets, digits)


def thin_points(positions: Sequence[float], values: Sequence[float], buckets: int, digits: int = DIGITS) -> Curve:
    """`positions` are in increasing order. `bad` are those of values that are not finite, one for each bucket."""
    if len(positions) <= 2 * buckets:
        return {"x": list(positions), "y": [rounded(value, digits) for value in values]}
    # The first and the last point stay as they are.
    begin, width, last = positions[0], (positions[-1] - positions[0]) / (buckets - 2), len(positions) - 1
    edges = [max(1, bisect_left(positions, begin + n * width, hi=last)) for n in range(1, buckets - 2)]
    curve: Curve = {"x": [], "y": [], "lo": [], "hi": [], "bad": []}
    start = 0
    for end in (1, *edges, last, last + 1):
        if end > start:
            _add_bucket(curve, positions[start:end], values[start:end], digits)
        start = end
    return curve


def _add_bucket(curve: Curve, positions: Sequence[float], values: Sequence[float], digits: int) -> None:
    curve["x"].append(positions[len(positions) // 2])
    mean = sum(values) / len(values)
    if not math.isfinite(mean):  # some are nan; or the sum of large values overflows
        bad = (position for position, value in zip(positions, values, strict=True) if not math.isfinite(value))
        curve["bad"].extend(islice(bad, 1))
        values = [value for value in values if math.isfinite(value)]
        mean = sum(value / len(values) for value in values) if values else math.nan
    curve["y"].append(rounded(mean, digits))
    curve["lo"].append(rounded(min(values, default=math.nan), digits))
    curve["hi"].append(rounded(max(values, default=math.nan), digits))


def rounded(value: float, digits: int = DIGITS) -> float | None:
    """With as many digits as a screen can show; JSON has no nan."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def histogram(values: Sequence[float], bins: int) -> dict[str, Any] | None:
    """Counts of values in intervals of equal width, from the 0.5th to the 99.5th percentile: a single slow step must
    not hide the others. What lies outside is counted in the first and the last interval."""
    known = sorted(value for value in values if math.isfinite(value))
    if len(known) < 2:
        return None
    low, high = known[len(known) // 200], known[-1 - len(known) // 200]
    width = (high - low) / bins or max(abs(low), 1e-9) * 1e-3
    edges = [bisect_left(known, low + n * width) for n in range(1, bins)]
    counts = [after - before for before, after in zip([0, *edges], [*edges, len(known)], strict=True)]
    middle = known[len(known) // 2]
    percentiles = {"p50": middle, "p99": known[min(len(known) - 1, len(known) * 99 // 100)]}
    return {"low": low, "width": width, "counts": counts, "least": known[0], "most": known[-1], **percentiles}
