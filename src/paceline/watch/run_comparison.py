"""`paceline compare`: runs side by side."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal

from paceline.text import columns, format_duration
from paceline.watch.metric_series import MetricSeries
from paceline.watch.plain_text import clean, number_text
from paceline.watch.run_facts import RunFacts, value_text
from paceline.watch.run_list import speed_text, step_text

By = Literal["step", "time", "samples"]

_ROWS = 8  # of losses
_MAX_KEYS = 60
_CELL = 40
_TITLES: dict[By, str] = {"step": "step", "time": "time (s)", "samples": "number of samples"}

Curve = list[tuple[float, float]]  # positions in increasing order, and losses


def comparison(runs: Sequence[RunFacts], by: By) -> str:
    """Results, differing keys of recipes, and losses at the same positions."""
    parts = [_results(runs), _recipes(runs), _losses(runs, by), _missing(runs, by)]
    return "\n\n".join(filter(None, parts))


def _results(runs: Sequence[RunFacts]) -> str:
    rows = [["run", *(clean(run.name, 60) for run in runs)]]
    rows.append(["state", *(str(run.state) for run in runs)])
    rows.append(["step", *(step_text(run.step, run.total_steps) for run in runs)])
    rows += _metric_rows("loss", "loss", [run.metrics["loss"] for run in runs])
    for name in dict.fromkeys(name for run in runs for name in run.metrics.evaluations):
        found = [run.metrics.evaluations.get(name, MetricSeries()) for run in runs]
        rows += _metric_rows(f"validation {clean(name, 30)}", name, found)
    rows.append(["speed", *(speed_text(run.metrics.speed) for run in runs)])
    accounts = [run.goodput() for run in runs]
    rows.append(["time", *("–" if each is None else format_duration(each.total) for each in accounts)])
    return columns(rows)


def _metric_rows(title: str, metric: str, found: Sequence[MetricSeries]) -> list[list[str]]:
    best = [series.best(metric) for series in found]
    texts = ["–" if each is None else f"{number_text(each[1])} (step {each[0]})" for each in best]
    return [[f"final {title}", *(number_text(series.last) for series in found)], [f"best {title}", *texts]]


def _recipes(runs: Sequence[RunFacts]) -> str:
    recipes = [run.recipe() for run in runs]
    known = [recipe for recipe in recipes if recipe is not None]
    if len(known) < 2:
        return ""
    differing = differing_keys(known)
    if not differing:
        return "recipes: no differences"
    rows = [["recipe", *(clean(run.name, 60) for run in runs)]]
    for key in differing[:_MAX_KEYS]:
        cells = ["–" if recipe is None or key not in recipe else value_text(recipe[key], _CELL) for recipe in recipes]
        rows.append([clean(key, 60), *cells])
    more = len(differing) - _MAX_KEYS
    return columns(rows) + (f"\nand {more} other keys" if more > 0 else "")


def differing_keys(recipes: Sequence[dict[str, Any]]) -> list[str]:
    """The dotted keys whose values differ, or that only some recipes have."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    absent = object()
    return [key for key in keys if len({repr(recipe.get(key, absent)) for recipe in recipes}) > 1]


def _losses(runs: Sequence[RunFacts], by: By) -> str:
    curves = [loss_curve(run, by) for run in runs]
    having = [curve for curve in curves if curve]
    positions = common_positions(having) if len(having) > 1 else []
    if not positions:
        return f"no loss at a common {_TITLES[by]}"
    rows = [[f"loss at {_TITLES[by]}", *(clean(run.name, 60) for run in runs)]]
    for position in positions:
        values = [_value_at(curve, position) for curve in curves]
        rows.append([f"{position:.1f}" if by == "time" else f"{position:.0f}", *map(number_text, values)])
    return columns(rows)


def loss_curve(run: RunFacts, by: By) -> Curve:
    """By time, only log points have a position: seconds since the first event of the run. Samples are steps × batch."""
    loss, times = run.metrics["loss"], run.metrics["time"]
    if by == "step":
        return list(zip(map(float, loss.steps), loss.values, strict=True))
    if by == "samples":
        batch = run.batch
        return (
            []
            if batch is None
            else [(float(n * batch), value) for n, value in zip(loss.steps, loss.values, strict=True)]
        )
    known = [(step, when) for step, when in zip(times.steps, times.values, strict=True) if math.isfinite(when)]
    began = next((event["time"] for event in run.events), known[0][1] if known else 0.0)
    found = [(when - began, value) for step, when in known if (value := loss.at(step)) is not None]
    return sorted(found, key=lambda point: point[0])


def common_positions(curves: Sequence[Curve]) -> list[float]:
    """A few positions that all curves have reached: points of the coarsest one."""
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    coarsest = min(curves, key=len)
    inside = [position for position, _ in coarsest if low <= position <= high]
    count = min(_ROWS, len(inside))
    return [inside[n * (len(inside) - 1) // max(1, count - 1)] for n in range(count)]


def _value_at(curve: Curve, position: float) -> float | None:
    """The loss at a position, or at the last one before it."""
    number = bisect_right(curve, position, key=lambda point: point[0])
    return curve[number - 1][1] if number else None


def _missing(runs: Sequence[RunFacts], by: By) -> str:
    lines = [f"{run.name}: {clean(problem)}" for run in runs for problem in run.problems]
    lines += [f"{run.name}: no readable recipe" for run in runs if run.recipe() is None]
    if by == "samples":
        lines += [f"{run.name}: the batch is unknown" for run in runs if run.batch is None]
    return "\n".join(lines)
