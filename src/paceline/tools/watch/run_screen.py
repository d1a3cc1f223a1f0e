"""`paceline show`: one run on one screen; and `paceline compare`: runs side by side."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Literal

from paceline.run import failures
from paceline.run.folder import short
from paceline.run.ledger import NO_WORD, RunEnd, last_start
from paceline.text import columns, format_bytes, format_duration, format_rate, numbered, plural, sparkline
from paceline.tools.watch.metric_series import ANY_METRIC, Metric, MetricSeries, finite
from paceline.tools.watch.plain_text import clean, clean_lines, number_text
from paceline.tools.watch.run_facts import Event, RunFacts, best_metric, saved_checkpoints, value_text
from paceline.tools.watch.run_list import run_values, speed_text, step_text

_MAX_CHECKPOINTS, _MAX_WARNINGS, _MAX_RANKS, _VERDICT_LINES = 6, 4, 16, 40
_CURVES = {"loss": "loss", "lr": "", "samples_per_second": ""}  # and the metric, where one value is the best


def screen(facts: RunFacts) -> str:
    parts = [_header(facts), _curves(facts), verdict(facts), _warnings(facts), _checkpoints(facts)]
    account = facts.goodput()
    parts += [account.table().splitlines() if account is not None and account.total else [], _files(facts)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def screen_values(facts: RunFacts) -> dict[str, Any]:
    """The same as plain values, for JSON."""
    account, chosen = facts.goodput(), best_metric(facts.recipe())
    return {
        **run_values(facts),
        "epoch": facts.metrics.epoch,
        "seconds": None if account is None else account.total,
        **{name: _integer(launched(facts), name) for name in ("ranks", "nodes")},
        "restarts": restarts(facts),
        "metrics": {name: _curve_values(facts.metrics[name], best) for name, best in _CURVES.items()},
        "evaluations": {name: _curve_values(each, name, chosen) for name, each in facts.metrics.evaluations.items()},
        "skipped_steps": facts.metrics.skipped_steps,
        "end": None if facts.state.end is None else asdict(facts.state.end),
        "hangs": [hang_values(event) for event in hangs(facts)],
        "warnings": warning_lines(facts),
        "checkpoints": [asdict(each) for each in saved_checkpoints(facts.folder)],
        "goodput": None if account is None else asdict(account),
        "logs": str(facts.folder.logs),
        "missing": facts.problems,
    }


def _header(facts: RunFacts) -> list[str]:
    account, start, epoch = facts.goodput(), launched(facts), facts.metrics.epoch
    said = [f"step {step_text(facts.step, facts.total_steps)}"] if facts.step is not None else ["no steps"]
    said += [] if epoch is None else [f"epoch {epoch}"]
    said += [] if account is None else [format_duration(account.total)]
    counts = [(_integer(start, f"{thing}s"), thing) for thing in ("rank", "node")]
    said += [plural(count, thing) for count, thing in counts if count is not None]
    said += [plural(restarts(facts), "restart")] if restarts(facts) else []
    when = facts.updated
    said += [f"last update {datetime.fromtimestamp(when):%Y-%m-%d %H:%M:%S}"] if 0 < when < 1e11 else []
    return [f"{facts.name}: {facts.state}", f"  {', '.join(said)}"]


def launched(facts: RunFacts) -> Mapping[str, Any]:
    return next((event for event in last_start(facts.events) if event["event"] == "launched"), {})


def _integer(event: Mapping[str, Any], name: str) -> int | None:
    value = event.get(name)
    return value if type(value) is int else None


def restarts(facts: RunFacts) -> int:
    return sum(event["event"] == "launched" and bool(event.get("generation")) for event in facts.events)


def _curves(facts: RunFacts) -> list[str]:
    metrics, chosen = facts.metrics, best_metric(facts.recipe())
    rows = [_curve("loss", "loss", metrics["loss"])]
    rows += [_curve(f"validation {clean(name, 30)}", name, each, chosen) for name, each in metrics.evaluations.items()]
    rows.append(_curve("learning rate", "", metrics["lr"]))
    speeds, usual = metrics["samples_per_second"], metrics.median_speed
    text = [f"last {speed_text(metrics.speed)}"] if metrics.speed else []
    text += [] if usual is None else [f"median {format_rate(usual)}"]
    rows += [("throughput", sparkline(speeds.values), ", ".join(text))] if text else []
    lines = columns(row for row in rows if row[2]).splitlines() if any(row[2] for row in rows) else []
    if metrics.skipped_steps:
        lines.append(f"{plural(metrics.skipped_steps, 'step')} skipped: the loss or the gradients were not finite")
    return [f"  {line}" for line in lines]


def _curve(title: str, metric: str, series: MetricSeries, chosen: Metric = ANY_METRIC) -> tuple[str, str, str]:
    if not series:
        return title, "", ""
    text = f"first {number_text(series.first)}, last {number_text(series.last)}"
    if metric and (best := series.best(metric, chosen)):
        text += f", best {number_text(best[1])} (step {best[0]})"
    return title, sparkline(series.values), text


def _curve_values(series: MetricSeries, metric: str, chosen: Metric = ANY_METRIC) -> dict[str, Any]:
    found = {"count": len(series), "first": finite(series.first), "last": finite(series.last)}
    best = series.best(metric, chosen) if metric else None
    return found if best is None else {**found, "best": {"step": best[0], "value": best[1]}}


def verdict(facts: RunFacts) -> list[str]:
    """Why it ended, unless it finished."""
    end = facts.state.end
    if end is None or end.state == "finished":
        return [clean(_NOT_KNOWN)] if facts.state.reason == NO_WORD else []
    after = "" if end.step is None else f" after step {end.step}"
    first = f"{end.state}: {clean(facts.state.reason, 60)}{after}"
    return [first, *(f"  {line}" for line in verdict_lines(end))]


_NOT_KNOWN = (
    f"{NO_WORD}: no process of the run is left, and none wrote why it ended. SIGKILL, a crash in native code, os._exit "
    "and a machine that goes down look like this without paceline launch, which would know"
)


def verdict_lines(end: RunEnd, limit: int = _VERDICT_LINES) -> list[str]:
    """What happened, and all of the traceback that fits: its end says more than its beginning."""
    place = [f"at: {end.place}"] if end.place and end.place not in end.text else []
    lines = clean_lines("\n".join(place + end.lines()), 1000)
    if len(lines) > limit:
        lines = [*lines[: limit // 4], "…", *lines[-(limit - limit // 4) :]]
    return lines


def _warnings(facts: RunFacts) -> list[str]:
    lines = []
    for hang in map(hang_values, hangs(facts)[-_MAX_WARNINGS:]):
        who = numbered("rank", hang["ranks"][:_MAX_RANKS]) + "…" * (len(hang["ranks"]) > _MAX_RANKS)
        kind, seconds = clean(hang["kind"], 40), number_text(hang["seconds"])
        lines.append(f"hang: {who if hang['ranks'] else 'ranks'} made no progress for {seconds} s ({kind})")
    return lines + warning_lines(facts)[-_MAX_WARNINGS:]


def hangs(facts: RunFacts) -> list[Event]:
    return [event for event in facts.events if event["event"] == "hang"]


def hang_values(event: Event) -> dict[str, Any]:
    ranks, seconds = event.get("ranks"), event.get("seconds")
    return {
        "kind": str(event.get("kind")),
        "ranks": [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else [],
        "seconds": finite(seconds) if isinstance(seconds, (int, float)) and abs(seconds) < 1e12 else None,
    }


def warning_lines(facts: RunFacts) -> list[str]:
    """The different warnings at the end of the log of rank 0."""
    if facts.folder.logs.is_symlink():
        return []
    lines = failures.tail(facts.folder, 0, lines=10_000).splitlines()
    return list(dict.fromkeys(clean(line) for line in lines if line.startswith("warning: ")))


def _checkpoints(facts: RunFacts) -> list[str]:
    found = saved_checkpoints(facts.folder)
    if not found:
        return ["no checkpoints"]
    rows = [
        (
            clean(each.name, 40),
            "–" if each.step is None else str(each.step),
            format_bytes(each.size),
            ", ".join(each.marks),
        )
        for each in found[:_MAX_CHECKPOINTS]
    ]
    more = len(found) - len(rows)
    lines = columns([("checkpoint", "step", "size", ""), *rows]).splitlines()
    return [*lines, f"and {more} older"] if more else lines


def _files(facts: RunFacts) -> list[str]:
    logs = facts.folder.rank_log.existing()
    where = f"logs: {clean(short(facts.folder.logs))}" if logs else "no logs"
    ranks = f" ({plural(len(logs), 'rank')})" if logs else ""
    return [f"{where}{ranks}", *(clean(problem) for problem in facts.problems)]


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
    chosen = [best_metric(run.recipe()) for run in runs]
    rows = [["run", *(clean(run.name, 60) for run in runs)]]
    rows.append(["state", *(str(run.state) for run in runs)])
    rows.append(["step", *(step_text(run.step, run.total_steps) for run in runs)])
    rows += _metric_rows("loss", "loss", [run.metrics["loss"] for run in runs], chosen)
    for name in dict.fromkeys(name for run in runs for name in run.metrics.evaluations):
        found = [run.metrics.evaluations.get(name, MetricSeries()) for run in runs]
        rows += _metric_rows(f"validation {clean(name, 30)}", name, found, chosen)
    rows.append(["speed", *(speed_text(run.metrics.speed) for run in runs)])
    accounts = [run.goodput() for run in runs]
    rows.append(["time", *("–" if each is None else format_duration(each.total) for each in accounts)])
    return columns(rows)


def _metric_rows(title: str, metric: str, found: Sequence[MetricSeries], chosen: Sequence[Metric]) -> list[list[str]]:
    best = [series.best(metric, each) for series, each in zip(found, chosen, strict=True)]
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
    if by != "time":
        unit = 1 if by == "step" else run.batch or 0
        return [(float(n * unit), value) for n, value in zip(loss.steps, loss.values, strict=True)] if unit else []
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
