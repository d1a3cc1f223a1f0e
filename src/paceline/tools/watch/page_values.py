"""What the page of a run shows, as plain values: the same for a live page and for a report.

head      what changes all the time: state, step, speed
series    curves; `since` a cursor, only what was appended
about     what seldom changes: events, where the time went, the verdict, recipe, checkpoints, layout, environment
ranks     a table of ranks × time, and the distribution of step times
media     images, texts and histograms that were logged
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from typing import Any

from paceline.diagnose.goodput import LABELS
from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.run.jsonl import Record, RecordStream
from paceline.run.ledger import NO_WORD
from paceline.text import parse_pairs
from paceline.tools.watch.live_run import LiveRun
from paceline.tools.watch.metric_series import (
    DIGITS,
    TIME_DIGITS,
    Metric,
    MetricSeries,
    RunMetrics,
    finite,
    histogram,
    rounded,
    thin,
)  # fmt: skip
from paceline.tools.watch.plain_text import clean, clean_line
from paceline.tools.watch.run_facts import (
    RunFacts,
    best_metric,
    checked_checkpoints,
    file_stamp,
    read_object,
    recipe_rows,
)
from paceline.tools.watch.run_screen import hang_values, hangs, launched, restarts, verdict_lines, warning_lines

BUCKETS = 1500
_COLUMNS = 200  # of the table of ranks
_BINS = 48
_MAX_EVENTS, _MAX_KEYS, _MAX_AXIS = 2000, 1000, 4096
_VERDICT_LINES, _MAX_TAGS = 60, 20
_MAX_TEXT_LINE = 5000
_SHOWN_EVENTS = {
    "launched", "restored", "saved", "save-failed", "evaluated", "hang", "continued", "failed", "finished", "ended",
    "warning", "lost",
}  # fmt: skip
_MEDIA_BYTES, _MAX_MEDIA, _MAX_IMAGE_BYTES = 1 << 24, 5000, 1 << 24
_TAIL_BYTES = 1 << 18
_SEARCHED_BYTES = 1 << 24
_MAX_LINE = 400  # characters


def changes(run: LiveRun, cursor: str, about_id: str) -> dict[str, Any]:
    """What is new for a page that has everything up to a cursor, and `about` with this id."""
    with run.lock:
        cursor, fresh, found = new_points(run, cursor)
        values = {"head": head(run), "cursor": cursor, "fresh": fresh, "curves": found}
        known = run.kept("about", lambda: _with_id(about(run)))
    return values if known[0] == about_id else {**values, "about_id": known[0], "about": known[1]}


def _with_id(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16], values


def head(run: LiveRun) -> dict[str, Any]:
    facts, metrics = run.facts, run.facts.metrics
    chosen = run.kept("save_best", lambda: best_metric(run.facts.recipe()))
    speed, unit = metrics.speed or (None, None)
    return {
        "name": clean(facts.folder.path.name, 80),
        "path": facts.name,
        "state": facts.state.name,
        "reason": clean(facts.state.reason, 80),
        "step": facts.step,
        "total": facts.total_steps,
        "epoch": metrics.epoch,
        "batch": facts.batch,
        "speed": finite(speed),
        "speed_unit": unit,
        "skipped": metrics.skipped_steps,
        "updated": facts.updated,
        "began": next((event["time"] for event in facts.events), None),
        "now": time.time(),
        "read": round(run.read_fraction, 3),
        "best": best_values(metrics, chosen),
        "save_best": evaluation_name(chosen[0]) if chosen[0] else None,
        "problems": [clean(problem) for problem in (*facts.problems, *run.statistics.problems)],
    }


def evaluation_name(metric: str) -> str:
    return f"eval/{clean(metric, 75)}"


def best_values(metrics: RunMetrics, chosen: Metric) -> dict[str, Any]:
    """By name: the step and the value of the best one."""
    found = {"loss": metrics["loss"].best("loss")}
    found |= {evaluation_name(name): each.best(name, chosen) for name, each in metrics.evaluations.items()}
    return {name: best for name, best in found.items() if best is not None}


def named_curves(metrics: RunMetrics) -> dict[str, MetricSeries]:
    return {
        **{clean(name, 80): each for name, each in metrics.series.items()},
        **{evaluation_name(name): each for name, each in metrics.evaluations.items()},
    }


def curves(run: LiveRun, low: int = 0, high: int = 1 << 53, buckets: int = BUCKETS) -> dict[str, Any]:
    """All curves between two steps."""
    found = named_curves(run.facts.metrics)
    return {name: thin(each, low, high, buckets, _digits(name)) for name, each in found.items() if each}


def _digits(name: str) -> int:
    return TIME_DIGITS if name == "time" else DIGITS


def new_points(run: LiveRun, since: str) -> tuple[str, bool, dict[str, Any]]:
    """A cursor, whether the curves replace those the page has, and the curves: what was appended since a cursor, or
    all of them."""
    found, lengths = named_curves(run.facts.metrics), _lengths(since, run.generation)
    cursor = f"{run.generation}:" + ",".join(str(len(each)) for each in found.values())
    if lengths is None or len(lengths) != len(found):
        return cursor, True, curves(run)
    appended: dict[str, Any] = {}
    for (name, each), before in zip(found.items(), lengths, strict=True):
        if len(each) - before > 2 * BUCKETS or before > len(each):
            return cursor, True, curves(run)
        if len(each) > before:
            values = [rounded(value, _digits(name)) for value in each.values[before:]]
            appended[name] = {"x": list(each.steps[before:]), "y": values}
    return cursor, False, appended


def _lengths(cursor: str, generation: int) -> list[int] | None:
    of, _, lengths = cursor.partition(":")
    try:
        return [int(length) for length in lengths.split(",") if length] if int(of) == generation else None
    except ValueError:
        return None


def ranks(run: LiveRun, known: str = "") -> dict[str, Any]:
    """The table of ranks and the distribution of step times; only their version if that is `known`."""
    with run.lock:
        batch, speeds = run.facts.batch, list(run.facts.metrics["samples_per_second"].values)
    times = [batch / speed for speed in speeds if speed > 0] if batch else []
    with run.updated_statistics() as statistics:
        version = f"{run.generation}.{statistics.version}.{len(speeds)}"
        if version == known:
            return {"version": version}
        # On a GPU, the time between two backwards does not tell how long a backward waits for others.
        has_gpu = any(name.startswith("GPU") for name, _ in _environment(run.facts))
        table = statistics.table(_COLUMNS, None if has_gpu else batch)
    return {"version": version, **table, "step_times": histogram(times, _BINS)}


def about(run: LiveRun) -> dict[str, Any]:
    facts = run.facts
    account = facts.goodput()
    times = [
        {"name": each.name, "label": LABELS.get(each.name, each.name), "seconds": getattr(account, each.name)}
        for each in (fields(account) if account is not None else ())
        if each.name == "training" or each.name in LABELS
    ]
    return {
        "events": _events(facts),
        "time": {"parts": times, "total": 0.0 if account is None else account.total},
        "restarts": restarts(facts),
        "verdict": _verdict(facts),
        "hangs": [{**each, "kind": clean(each["kind"], 40)} for each in map(hang_values, hangs(facts))][-20:],
        "warnings": warning_lines(facts)[-50:],
        "layout": _layout(facts),
        "derived": [
            [clean(text, 200) for text in (name, each.get("value"), each.get("reason", ""))]
            for name, each in read_object(facts.folder.derived).items()
            if isinstance(each, dict)
        ],
        "recipe": recipe_rows(facts.folder)[:_MAX_KEYS],
        "environment": _environment(facts),
        "checkpoints": checked_checkpoints(facts.folder),
        "logs": sorted(facts.folder.rank_log.existing()) if not facts.folder.logs.is_symlink() else [],
        "profiles": _profiles(facts),
    }


def tags(recipe: Mapping[str, Any] | None) -> list[str]:
    """Those of a recipe."""
    found = (recipe or {}).get("tags")
    return [clean(tag, 40) for tag in found[:_MAX_TAGS]] if isinstance(found, list) else []


def _events(facts: RunFacts) -> list[dict[str, Any]]:
    shown = [event for event in facts.events if event["event"] in _SHOWN_EVENTS]
    if shown and facts.state.reason == NO_WORD:
        shown.append({"time": facts.updated, "event": "lost", "text": facts.state.reason})
    if (end := facts.state.end) and end.state == "failed" and "failed" not in {event["event"] for event in shown}:
        shown.append({**end.to_event(), "time": end.time, "event": "failed"})
    named = ("signal", "exception", "text", "cause", "kind")  # the first that an event has
    kept = ("step", "seconds", "generation", "nodes", "ranks", "status", "rank")
    return [
        {
            "time": event["time"],
            "event": event["event"],
            "text": clean(next(filter(None, map(event.get, named)), ""), 300),
            **{name: event[name] for name in kept if _is_number(event.get(name))},
        }
        for event in shown[-_MAX_EVENTS:]
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def _verdict(facts: RunFacts) -> dict[str, Any] | None:
    end = facts.state.end
    if end is None or end.state == "finished":
        return None
    place = {name: value for name, value in (("rank", end.rank), ("step", end.step)) if value is not None}
    words = {name: clean(getattr(end, name), 200) for name in ("state", "cause", "signal", "exception", "place")}
    return {**words, **place, "reason": clean(facts.state.reason, 80), "lines": verdict_lines(end, _VERDICT_LINES)}


def _layout(facts: RunFacts) -> dict[str, Any]:
    """Axes from the outermost to the innermost, with their degrees; numbers of ranks and nodes."""
    first = launched(facts)
    text = facts.derived.get("layout")
    pairs = parse_pairs(text.replace(" ", ",")) if isinstance(text, str) and len(text) < 200 else []
    axes = [(clean(name, 20), int(degree)) for name, degree in pairs if degree and degree.isdecimal()]
    sizes = {name: first.get(name) for name in ("ranks", "nodes")}
    known = {name: size for name, size in sizes.items() if type(size) is int and 0 < size <= _MAX_AXIS}
    axes = axes if math.prod(degree for _, degree in axes) == known.get("ranks") else []
    return {"axes": axes, "strategy": clean(facts.derived.get("strategy", ""), 40), **known}


def _environment(facts: RunFacts) -> list[tuple[str, str]]:
    entries = read_object(facts.folder.environment).items()
    return [(clean(name, 60), clean(value, 300)) for name, value in list(entries)[:100]]


def _profiles(facts: RunFacts) -> list[dict[str, Any]]:
    """Where the time of profiled steps went, by rank, in milliseconds per step."""
    found = []
    paths = facts.folder.profile_split
    for rank, path in list(paths.existing().items())[:64] if not paths.folder.is_symlink() else ():
        split = read_object(path)
        names = ("step", "compute", "exposed", "idle", "communication")
        if all(_is_number(split.get(name)) for name in names):
            operations = _operations(split.get("operations"))
            found.append({"rank": rank, **{name: split[name] for name in names}, "operations": operations})
    return found


def _operations(rows: object) -> list[tuple[str, float, float]]:
    """Names, milliseconds and calls per step."""
    known = [row for row in rows if isinstance(row, list) and len(row) == 3] if isinstance(rows, list) else []
    return [
        (clean(name, 60), each, calls) for name, each, calls in known[:12] if _is_number(each) and _is_number(calls)
    ]


def media(folder: RunFolder, known: str = "") -> dict[str, Any]:
    """The last images, texts and histograms that were logged; only their version if that is `known`."""
    version = "{}.{}".format(*file_stamp(folder.media))
    if version in (known, "0.0"):
        return {"version": version}
    stream = RecordStream(folder.media, _MEDIA_BYTES)
    entries = [entry for record in chain.from_iterable(stream) if (entry := _media_entry(record)) is not None]
    last = {(entry["kind"], entry["name"], entry["step"]): entry for entry in entries}
    return {"version": version, "entries": list(last.values())[-_MAX_MEDIA:]}


def _media_entry(record: Record) -> dict[str, Any] | None:
    kind, name, step, text, counts = (record.get(key) for key in ("kind", "name", "step", "text", "counts"))
    keys = ("time", "low", "width", "height", "mean", "std", "nonfinite")
    entry = {"kind": kind, "name": name, "step": step, "clipped": record.get("clipped") is True}
    entry |= {key: record[key] for key in keys if _is_number(record.get(key))}
    if kind == "text" and isinstance(text, str):
        entry["text"] = "\n".join(clean_line(line, _MAX_TEXT_LINE) for line in text.splitlines())
    elif kind == "histogram" and isinstance(counts, list) and all(map(_is_number, counts)) and "low" in entry:
        entry["counts"] = counts[:1024]
    elif kind != "image":
        return None
    is_known = name == clean(name, 80) and type(step) is int and 0 <= step < 1 << 53
    return entry if is_known and (kind == "text" or "width" in entry) else None


def image_bytes(folder: RunFolder, name: str, step: int) -> bytes:
    """A PNG file; nothing if there is none. Its place follows from name and step, not from the record of the image."""
    with suppress(OSError):
        data = regular_files.read_bytes(folder.image(name, step), _MAX_IMAGE_BYTES)
        return data if data.startswith(b"\x89PNG\r\n\x1a\n") and not folder.images.is_symlink() else b""
    return b""


def log_lines(folder: RunFolder, rank: int, search: str = "", most: int = 500) -> dict[str, Any]:
    """The last lines, or the last ones that contain `search` in any case, each with its number, counted from the first
    one that was read. `skipped` bytes at the beginning of the file were not read."""
    path = folder.rank_log(rank)
    if folder.logs.is_symlink():
        return {"lines": [], "skipped": 0, "problem": "the folder of logs is a link"}
    try:
        with os.fdopen(regular_files.open_descriptor(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            skipped = file.seek(max(0, size - (_SEARCHED_BYTES if search else _TAIL_BYTES)))
            text = file.read(_SEARCHED_BYTES).decode(errors="replace")
    except OSError as error:
        return {"lines": [], "skipped": 0, "problem": f"{path.name}: {error.strerror}"}
    # A progress bar overwrites its line.
    lines = [line.rpartition("\r")[2] for line in text.rstrip("\n").split("\n")] if text else []
    wanted = search.lower()
    found = [(number, line) for number, line in enumerate(lines, 1) if wanted in line.lower()]
    kept = [(number, clean_line(line, _MAX_LINE)) for number, line in found[-most:]]
    return {"lines": kept, "found": len(found), "skipped": skipped, "problem": None}
