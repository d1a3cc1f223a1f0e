"""What a study has found, for people: tables and curves in the terminal, an HTML page, and the best recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from paceline.config.files import Dumper
from paceline.errors import SearchError
from paceline.run import regular_files
from paceline.search.space import set_key
from paceline.search.study import Study
from paceline.search.trial import Trial
from paceline.text import format_duration, plural

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 24
_IMPORTANCE_WIDTH = 30
_SHOWN = 10


def summary(study: Study, shown: int = _SHOWN) -> str:
    """The best trials with their learning curves, how many ended how, and the importance of each parameter."""
    trials, section = study.ranked(), study.section
    if not trials:
        return f"{study.folder.short}: no trial has started yet"
    lines = [_counts(trials), ""]
    keys = [parameter.key for parameter in study.space]
    titles = ["trial", section.metric, "state", "steps", "time", "curve", *keys]
    listed = [each for each in trials if each.state != "failed"][:shown]
    low, high = _bounds(listed)
    rows = [
        [
            str(each.number),
            "–" if each.value is None else f"{each.value:.6g}",
            each.state,
            str(each.steps),
            format_duration(each.seconds),
            sparkline(each.values, low, high),
            *(_short(each.params.get(key)) for key in keys),
        ]
        for each in listed
    ]
    lines += _table(titles, rows)
    failed = [each for each in trials if each.state == "failed"]
    lines += ["", *(f"trial {each.number} failed: {each.verdict}" for each in failed)] if failed else []
    if importances := study.importances():
        width = max(map(len, importances))
        lines += ["", "importance of parameters (PED-ANOVA: which values the best trials share)"]
        lines += [
            f"  {key:<{width}}  {value:5.2f}  {'█' * round(_IMPORTANCE_WIDTH * value)}"
            for key, value in importances.items()
        ]
    return "\n".join(lines)


def sparkline(values: Mapping[int, float], low: float, high: float) -> str:
    """A curve in a line, on a scale that all trials share."""
    points = [values[step] for step in sorted(values)]
    if len(points) > _CURVE_WIDTH:
        points = [points[number * (len(points) - 1) // (_CURVE_WIDTH - 1)] for number in range(_CURVE_WIDTH)]
    span = high - low
    return "".join(_BARS[round((len(_BARS) - 1) * (point - low) / span) if span > 0 else 0] for point in points)


def write_best(study: Study) -> Trial | None:
    """Write the recipe of the best trial, ready to run."""
    best = study.best
    if best is None or not study.recipe:
        return best
    values = dict(study.recipe)
    for key, value in best.params.items():
        set_key(values, key.split("."), value)
    comment = f"# Trial {best.number} of {study.folder.short}: {study.section.metric} {best.value:.6g}\n"
    text = comment + yaml.dump(values, Dumper=Dumper, sort_keys=False, default_flow_style=None)
    regular_files.replace(study.folder.best_recipe, text.encode())
    return best


def write_html(study: Study) -> None:
    """Optuna's own plots in one page that needs no network."""
    try:
        import plotly.io
    except ImportError:
        raise SearchError(
            "no-plotly", "The HTML page needs plotly, which is not installed.", fix="pip install 'paceline[sweep]'"
        ) from None
    from optuna import visualization as plots

    found = study.optuna_study
    figures = [
        plots.plot_optimization_history(found),
        plots.plot_intermediate_values(found),
        plots.plot_slice(found),
        plots.plot_parallel_coordinate(found),
        plots.plot_timeline(found),
    ]
    parts = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(figures)
    ]
    title = _escape(study.folder.path.name)
    text = _escape(summary(study, shown=len(study.trials())))
    page = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        "<style>body{font-family:system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
        "pre{overflow-x:auto}</style></head>"
        f"<body><h1>{title}</h1><pre>{text}</pre>{''.join(parts)}</body></html>\n"
    )
    regular_files.replace(study.folder.report, page.encode())


def _counts(trials: Sequence[Trial]) -> str:
    states = ("complete", "pruned", "failed", "paused", "running")
    counted = [(sum(each.state == state for each in trials), state) for state in states]
    steps = sum(each.steps for each in trials)
    listed = ", ".join(f"{number} {state}" for number, state in counted if number)
    return f"{plural(len(trials), 'trial')}: {listed}; {plural(steps, 'step')}"


def _bounds(trials: Sequence[Trial]) -> tuple[float, float]:
    points = [value for each in trials for value in each.values.values() if math.isfinite(value)]
    return (min(points), max(points)) if points else (0.0, 0.0)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (titles, *rows)]  # fmt: skip


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
