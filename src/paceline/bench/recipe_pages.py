"""HTML pages of `paceline bench step` and `paceline bench scaling`."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.scaling import ScalingEntry
from paceline.bench.step_report import StepReport
from paceline.plan.scaling_model import EXPECTED
from paceline.watch.charts import ChartAxis, Series, line_chart, page, paragraph, stacked_bars, table


def step_page(title: str, about: str, report: StepReport, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    parts = [(name, max(0.0, part.median * 1e3)) for name, part in report.parts.items()]
    bars = [("step", [value for _, value in parts])]
    chart = stacked_bars("Parts of a step", bars, [name for name, _ in parts], y=ChartAxis("ms"))
    return page(title, [paragraph(about), chart, table(rows), *map(paragraph, notes)])


def scaling_page(
    title: str,
    entries: Sequence[ScalingEntry],
    tables: Sequence[tuple[str, Sequence[Sequence[str]]]],
    notes: Sequence[str],
) -> str:
    parts = []
    for mode, (heading, rows) in zip(dict.fromkeys(entry.mode for entry in entries), tables, strict=True):
        good = [entry for entry in entries if entry.mode == mode and not entry.failed]
        parts += [_speed_chart(heading, good), table(rows)] if good else []
    return page(title, [*parts, *map(paragraph, notes)])


def _speed_chart(heading: str, entries: Sequence[ScalingEntry]) -> str:
    first = entries[0]
    measured = [(float(entry.ranks), entry.rate) for entry in entries]
    predicted = [(float(entry.ranks), entry.batch / entry.predicted) for entry in entries if entry.predicted]
    series = [
        Series("measured", points=measured, line=measured),
        Series("ideal", line=[(ranks, first.rate * ranks / first.ranks) for ranks, _ in measured], dashed=True),
    ]
    if predicted:
        series.append(Series("predicted", points=predicted))
    if first.ranks == 1:
        known = [entry.ranks for entry in entries if entry.ranks in EXPECTED]
        low = [(float(ranks), first.rate * EXPECTED[ranks][0]) for ranks in known]
        series += [Series("expected at least", line=[(1.0, first.rate), *low], dashed=True)] if known else []
    return line_chart(heading, series, x=ChartAxis("ranks"), y=ChartAxis("samples/s"))
