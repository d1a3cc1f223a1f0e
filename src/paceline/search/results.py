"""What a study has found, for people: tables and curves in the terminal, an HTML page, and the best recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import yaml

from paceline.config.files import Dumper
from paceline.run import regular_files
from paceline.search.space import Parameter, set_key
from paceline.search.study import Study
from paceline.search.trial import Trial
from paceline.text import columns, format_duration, plural, sparkline
from paceline.watch import sheet

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
    scale = [value for each in listed for value in each.values.values()]
    rows = [
        [
            str(each.number),
            "–" if each.value is None else f"{each.value:.6g}",
            each.state,
            str(each.steps),
            format_duration(each.seconds),
            sparkline([each.values[step] for step in sorted(each.values)], _CURVE_WIDTH, scale),
            *(_short(each.params.get(key)) for key in keys),
        ]
        for each in listed
    ]
    lines.append(columns([titles, *rows]))
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
    """All trials, their history and curves, and the metric by each parameter, in one page that needs no network."""
    trials, metric = study.ranked(), sheet.ChartAxis(study.section.metric, from_zero=False)
    parts = [sheet.paragraph(summary(study, shown=len(trials)))]
    done = [(each, each.value) for each in trials if each.state == "complete" and each.value is not None]
    if done:
        values = sorted((float(each.number), value) for each, value in done)
        better = min if study.minimizes else max
        best = list(accumulate(values, lambda before, new: (new[0], better(before[1], new[1]))))
        history = [sheet.Series("trials", values), sheet.Series("best so far", line=best)]
        parts.append(sheet.line_chart("History", history, x=sheet.ChartAxis("trial"), y=metric))
    curves = [
        sheet.Series(f"trial {each.number}", points, points)
        for each in trials
        if (points := [(float(step), value) for step, value in sorted(each.values.items())])
    ][:_SHOWN]
    if curves:
        title = f"Curves of the best {plural(len(curves), 'trial')}"
        parts.append(sheet.line_chart(title, curves, x=sheet.ChartAxis("step"), y=metric))
    for parameter in study.space if done else ():
        axis, place = _axis(parameter)
        points = [(place(each.params[parameter.key]), value) for each, value in done]
        parts.append(sheet.line_chart(parameter.key, [sheet.Series("trials", points)], x=axis, y=metric))
    regular_files.replace(study.folder.report, sheet.page(study.folder.path.name, parts).encode())


def _axis(parameter: Parameter) -> tuple[sheet.ChartAxis, Callable[[Any], float]]:
    """The axis of a parameter, and where a value is on it: choices are at their numbers."""
    if parameter.kind == "choice":
        choices = [json.dumps(value) for value in parameter.values]  # True and 1 are equal
        axis = sheet.ChartAxis(parameter.key, names=[str(value) for value in parameter.values])
        return axis, lambda value: float(choices.index(json.dumps(value)))
    return sheet.ChartAxis(parameter.key, log=10 if "log" in parameter.kind else None, from_zero=False), float


def _counts(trials: Sequence[Trial]) -> str:
    states = ("complete", "pruned", "failed", "paused", "running")
    counted = [(sum(each.state == state for each in trials), state) for state in states]
    steps = sum(each.steps for each in trials)
    listed = ", ".join(f"{number} {state}" for number, state in counted if number)
    return f"{plural(len(trials), 'trial')}: {listed}; {plural(steps, 'step')}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
