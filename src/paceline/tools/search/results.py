"""What a study has found, for people: tables and curves in the terminal, an HTML page, and the best recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from paceline.config.files import Dumper
from paceline.run import regular_files
from paceline.text import columns, format_duration, plural, sparkline
from paceline.tools.search.space import set_key
from paceline.tools.search.study import Study
from paceline.tools.search.trial import Trial
from paceline.tools.watch.report import standalone_page

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
            *(f"{value:.4g}" if isinstance(value := each.params.get(key), float) else str(value) for key in keys),
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


def page_values(study: Study) -> dict[str, Any]:
    """What the page of a sweep shows (watch/page/sweep_view.js); trials are ranked."""
    trials = study.ranked()
    shown = ("number", "params", "state", "value", "steps", "seconds", "verdict")
    return {
        "title": study.folder.path.name,
        "metric": study.section.metric,
        "minimizes": study.minimizes,
        "counts": _counts(trials).partition(": ")[2].partition(";")[0],
        "space": [
            {"key": each.key, "log": "log" in each.kind, "choices": each.values if each.kind == "choice" else None}
            for each in study.space
        ],
        "importances": study.importances(),
        "trials": [{**{k: getattr(each, k) for k in shown}, "curve": sorted(each.values.items())} for each in trials],
    }


def write_html(study: Study) -> None:
    """A page about all trials that needs no network."""
    regular_files.replace(study.folder.report, standalone_page({"sweep": page_values(study)}))


def _counts(trials: Sequence[Trial]) -> str:
    states = ("complete", "pruned", "failed", "paused", "running")
    counted = [(sum(each.state == state for each in trials), state) for state in states]
    steps = sum(each.steps for each in trials)
    listed = ", ".join(f"{number} {state}" for number, state in counted if number)
    return f"{plural(len(trials), 'trial')}: {listed}; {plural(steps, 'step')}"
