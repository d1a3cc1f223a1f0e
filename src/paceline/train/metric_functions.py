"""Metric functions in an evaluation: values that do not depend on ranks, batches or micro-batches.

Sums are kept on the device and combined at the end. For a function that returns one number per batch, every rank also
keeps outputs and targets in host memory; the function is then called once, on those of all samples. If they would take
more than a gigabyte, or can't be concatenated, the mean over the batches is recorded, with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.data.batches import apply
from paceline.data.predictions import CollectedRows, gather_in_order, why_not_gathered
from paceline.errors import TrainError
from paceline.models.losses import WeightedSums, means_of
from paceline.models.metrics import (
    KINDS,
    PER_BATCH,
    PER_VALUE,
    MetricResult,
    NamedMetric,
    ResultKind,
    read_metric,
    require_one_kind,
)
from paceline.runtime import collectives
from paceline.runtime.consistency import run_on_all_ranks
from paceline.runtime.mesh import Mesh

MAX_BYTES = 1 << 30  # of outputs and targets, over all ranks


class MetricFunctions:
    """The metric functions of one evaluation, over `samples` samples if that is known."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], mesh: Mesh, samples: int | None, warn: Callable[[str], None]
    ) -> None:
        self._functions, self._mesh, self._warn = functions, mesh, warn
        self._kinds: dict[str, list[ResultKind]] = {}  # seen so far, by recorded name
        self._metrics: dict[str, str] = {}  # recorded name → metric
        self._sums = {kind: WeightedSums(mesh.device) for kind in KINDS}
        self._rows = CollectedRows(mesh.data_ranks, samples, MAX_BYTES)

    def add(self, outputs: Any, targets: Any, samples: int, first: int) -> None:
        """Measure a batch, whose first sample is the `first` of the data."""
        for metric in [metric for metric in self._functions if not self._is_number(metric)]:
            for name, (kind, total, weight) in self._call(metric, outputs, targets, samples):
                if kind != PER_BATCH:
                    self._sums[kind or PER_VALUE].add(name, total, weight)
        if not self._of_whole():
            self._rows.drop("it first appeared in a later batch")
        elif not self._rows.keep((outputs, targets), samples, first):
            self._add_numbers(outputs, targets, samples)

    def _call(self, metric: str, outputs: Any, targets: Any, samples: int) -> Iterator[tuple[str, MetricResult]]:
        for name, result in read_metric(metric, self._functions[metric](outputs, targets), samples):
            if self._metrics.setdefault(name, metric) != metric:
                raise _same_name(name, self._metrics[name], metric)
            seen = self._kinds.setdefault(name, [])
            if result.kind is not None and result.kind not in seen:
                seen.append(result.kind)
            yield name, result

    def _is_number(self, metric: str) -> bool:
        """Whether all that a metric returns are numbers, so that it need not be called for every batch."""
        kinds = [seen for name, seen in self._kinds.items() if self._metrics[name] == metric]
        return bool(kinds) and all(seen == [PER_BATCH] for seen in kinds)

    def _of_whole(self) -> list[str]:
        """Metrics that may return numbers, as far as this rank knows."""
        names = [name for name, seen in self._kinds.items() if not seen or PER_BATCH in seen]
        return list(dict.fromkeys(self._metrics[name] for name in names))

    def _add_numbers(self, outputs: Any, targets: Any, samples: int) -> None:
        """Add the numbers of a batch, and of those kept until now, to means that are recorded if the whole is out of
        reach."""
        for kept, count in self._rows.take():
            kept_outputs, kept_targets = self._on_device(kept)
            self._add_numbers(kept_outputs, kept_targets, count)
        for metric in self._of_whole() if samples else ():
            for name, result in self._call(metric, outputs, targets, samples):
                if result.kind in (PER_BATCH, None):
                    self._sums[PER_BATCH].add(name, result.sum * samples, samples)

    def _on_device(self, rows: Any) -> Any:
        return apply(rows, lambda tensor: tensor.to(self._mesh.device))

    def values(self) -> dict[str, float]:
        """The values over all batches and ranks. Collective: must be called on every rank."""
        if not self._functions:
            return {}
        kinds, reports = self._combine()
        numbers = [name for name, kind in kinds.items() if kind == PER_BATCH]
        why_not = why_not_gathered(reports)
        if numbers and why_not:
            self._warn(
                f"metric {', '.join(map(repr, numbers))}: the mean over batches is recorded, which depends on the "
                f"batch size and the number of ranks, because {why_not}. Return one value per sample or "
                "paceline.Loss(sum, weight), or use torchmetrics"
            )
            self._add_numbers(None, None, 0)
            kinds, reports = self._combine()
        means = {kind: means_of([report["sums"][kind] for report in reports]) for kind in KINDS}
        found = {name: self._finish(name, means[kind].get(name, math.nan)) for name, kind in kinds.items()}
        return {**found, **self._measure_whole(numbers, reports)} if numbers and not why_not else found

    def _finish(self, name: str, mean: float) -> float:
        metric = self._functions.get(name)
        return metric.finish(mean) if isinstance(metric, NamedMetric) else mean

    def _combine(self) -> tuple[dict[str, ResultKind], list[dict[str, Any]]]:
        """The kind of each result, and what all ranks have."""
        sums = {kind: each.totals() for kind, each in self._sums.items()}
        reports = collectives.all_gather_object({"kinds": self._kinds, "sums": sums, **self._rows.report()})
        kinds: dict[str, list[ResultKind]] = {}
        for report in reports:
            for name, seen in report["kinds"].items():
                known = kinds.setdefault(name, [])
                known += [kind for kind in seen if kind not in known]
        return {name: require_one_kind(name, seen) for name, seen in kinds.items()}, reports

    def _measure_whole(self, names: list[str], reports: list[dict[str, Any]]) -> dict[str, float]:
        """The values of functions that return a number, called once on the outputs of all ranks."""
        dst = next(rank for rank, report in enumerate(reports) if report["rows"])  # has outputs, in their own type
        rows = gather_in_order(self._rows.parts, self._rows.positions, self._mesh.device, dst=dst)
        samples = sum(report["rows"] for report in reports)

        def measure() -> dict[str, float]:
            if rows is None:
                return {}
            outputs, targets = self._on_device(rows)
            results = [each for metric in self._of_whole() for each in self._call(metric, outputs, targets, samples)]
            return {name: float(result.sum) / float(result.weight) for name, result in results}

        whole = collectives.broadcast_object(run_on_all_ranks(measure, "Computing a metric"), src=dst)
        return {name: whole[name] for name in names if name in whole}


def _same_name(name: str, *metrics: str) -> TrainError:
    return TrainError(
        "reserved-name", f"Metrics {metrics[0]!r} and {metrics[1]!r} both have {name!r}.", fix="rename one of them"
    )
