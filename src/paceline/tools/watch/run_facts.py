"""What can be read about one run: its recipe, state, steps, metrics, events and checkpoints, and what is missing."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import xxhash

from paceline.config import files
from paceline.diagnose.goodput import Goodput, summarize
from paceline.errors import ConfigError
from paceline.run import heartbeat, ledger, lock, regular_files
from paceline.run.folder import RunFolder
from paceline.run.heartbeat import Heartbeat
from paceline.run.ledger import NO_WORD, RunEnd, find_end, last_start
from paceline.text import flatten
from paceline.tools.watch.metric_series import TAIL_BYTES, Metric, RunMetrics, read_metrics
from paceline.tools.watch.plain_text import clean

_MAX_LEDGER = 1 << 26  # bytes; a week of training writes one megabyte
_MAX_JSON = 1 << 20


@dataclass(frozen=True)
class RunFacts:
    folder: RunFolder
    state: RunState
    events: Sequence[Event]
    metrics: RunMetrics
    heartbeats: dict[int, Heartbeat]
    derived: dict[str, Any]  # values that the run derived from its recipe
    problems: list[str] = field(default_factory=list)  # what is missing or unreadable

    @property
    def name(self) -> str:
        return clean(self.folder.short)

    @property
    def step(self) -> int | None:
        """The last completed one; heartbeats are ahead of the metrics while a run is running."""
        beats = [beat.step for beat in self.heartbeats.values()] if self.state.name == "running" else []
        return max((step for step in (self.metrics.step, *beats) if step is not None), default=None)

    @property
    def total_steps(self) -> int | None:
        return self._positive("horizon")

    @property
    def batch(self) -> int | None:
        return self._positive("batch")

    def _positive(self, name: str) -> int | None:
        value = self.derived.get(name)
        return value if isinstance(value, int) and 0 < value < 1 << 53 else None

    @property
    def updated(self) -> float:
        """When the run last told something."""
        times = [event["time"] for event in self.events[-1:]]
        times += [value for value in self.metrics["time"].values[-1:] if abs(value) < 1e12]
        folder = self.folder
        files = (folder.metrics, folder.ledger, folder.config, folder.path)
        return max(times, default=0.0) or max(map(file_stamp, files))[0] / 1e9

    def goodput(self) -> Goodput | None:
        """Where the time went; None if the ledger does not tell."""
        try:
            account = summarize(self.folder) if self.events else None
        except (ValueError, OverflowError):  # numbers that no run writes
            return None
        return account if account is not None and math.isfinite(account.total) else None

    def recipe(self) -> dict[str, Any] | None:
        """The effective recipe by dotted keys; None if it is missing or invalid."""
        entries = recipe_entries(self.folder)
        return None if entries is None else {key: value for key, value, _ in entries}


def read_facts(folder: RunFolder, *, quick: bool = False) -> RunFacts:
    """`quick` reads only the end of the metrics."""
    return read_other_facts(folder, read_metrics(folder, TAIL_BYTES if quick else None))


def read_other_facts(folder: RunFolder, metrics: RunMetrics) -> RunFacts:
    """All facts, where the metrics are known already."""
    events, problems = read_events(folder)
    beats = {} if folder.logs.is_symlink() else heartbeat.read(folder)
    state, entries = find_state(folder, events), read_object(folder.derived).items()
    derived = {name: entry.get("value") for name, entry in entries if isinstance(entry, dict)}
    return RunFacts(folder, state, events, metrics, beats, derived, [*problems, *metrics.problems])


def read_events(folder: RunFolder) -> tuple[list[Event], list[str]]:
    try:
        size = folder.ledger.lstat().st_size
    except OSError:
        return [], [f"{folder.ledger.name} is missing: state and times are unknown"]
    if size > _MAX_LEDGER:
        return [], [f"{folder.ledger.name} is too large ({size >> 20} MiB): state and times are unknown"]
    events = [event for event in ledger.events(folder) if isinstance(event["event"], str)]
    return events, [] if events else [f"{folder.ledger.name} has no events: state and times are unknown"]


def read_object(path: Path) -> dict[str, Any]:
    """That of a small JSON file; empty if there is none."""
    try:
        found = json.loads(regular_files.read_bytes(path, _MAX_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def file_stamp(path: Path) -> tuple[int, int]:
    """When it was modified, in nanoseconds, and its size; zeros if it is missing."""
    try:
        found = path.lstat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def recipe_entries(folder: RunFolder) -> list[tuple[str, Any, str]] | None:
    """(dotted key, value, origin), in the order of the file. None if it is missing or invalid."""
    try:
        if folder.config.is_symlink():  # it may lead out of the run folder
            return None
        values, numbers = files.read(folder.config)
        lines = regular_files.read_text(folder.config).splitlines()
    except (ConfigError, OSError):
        return None
    entries = []
    for key, value in flatten(values, keep_empty=True).items():
        number = numbers.get(key, 0)
        line = lines[number - 1] if 0 < number <= len(lines) else ""
        entries.append((key, value, line.rpartition("  # ")[2] if "  # " in line else ""))
    return entries


def recipe_rows(folder: RunFolder) -> list[tuple[str, str, str]]:
    """`recipe_entries` as text."""
    entries = recipe_entries(folder) or []
    return [(clean(key, 80), value_text(value), clean(origin, 120)) for key, value, origin in entries]


def best_metric(recipe: Mapping[str, Any] | None) -> Metric:
    """That of `save_best`; ANY_METRIC if the recipe has none."""
    name, mode = ((recipe or {}).get(f"save_best.{key}") for key in ("metric", "mode"))
    return str(name or ""), mode if mode in ("min", "max") else None


def value_text(value: object, limit: int = 200) -> str:
    """As it is written in a recipe."""
    return clean("null" if value is None else str(value).lower() if isinstance(value, bool) else value, limit)


Event = dict[str, Any]

_START_SECONDS = 120.0  # how long ranks may need until rank 0 takes the lock


@dataclass(frozen=True)
class RunState:
    name: Literal["running", "finished", "failed", "interrupted", "unknown"]
    reason: str = ""
    end: RunEnd | None = None

    def __str__(self) -> str:
        return f"{self.name} ({clean(self.reason, 60)})" if self.reason else self.name


def find_state(folder: RunFolder, events: Sequence[Event]) -> RunState:
    """`events` are those of the ledger."""
    hung = is_hung(last_start(events))
    try:
        is_held, holder = lock.look(folder)
    except OSError:  # there is no lock, or it can't be read
        is_held, holder = False, None
    if is_held:
        return RunState("running", "hung" if hung else "")
    if end := find_end(events):
        return RunState(end.state, end.reason + (", hung" if hung and end.state == "interrupted" else ""), end)
    if not any(event["event"] == "launched" for event in events):
        return RunState("unknown", "" if events else "no ledger")
    if holder is None and 0 <= time.time() - last_start(events)[-1]["time"] < _START_SECONDS:
        return RunState("running", "starting")
    host = str((holder or {}).get("host", ""))
    if host and host != socket.gethostname():  # it may still run there, and this is a copy
        return RunState("unknown", f"last seen running on {host}")
    return RunState("interrupted", NO_WORD)


def is_hung(last: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last thing that the launcher had to say about progress is that ranks make none."""
    told = [event for event in last if event["event"] in ("hang", "continued", "stepped")]
    return bool(told) and told[-1]["event"] == "hang"


_MAX_POINTER = 1 << 16
_MAX_MANIFEST = 1 << 24
_MAX_CHECKED = 30
_MANIFEST, _DIGEST = "manifest.json", "manifest.xxh128"  # as in checkpoint/manifest.py, which imports torch


@dataclass(frozen=True)
class SavedCheckpoint:
    name: str
    step: int | None  # None: the name does not tell
    size: int  # bytes of its shards
    marks: list[str]  # latest, best


def saved_checkpoints(folder: RunFolder) -> list[SavedCheckpoint]:
    """Newest first. Saves in progress and links are left out."""
    if folder.checkpoints.is_symlink():
        return []
    pointers = {path.name: _names_in(path) for path in (folder.latest, folder.best)}
    found = []
    for entry in _entries(folder.checkpoints):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            numbered = re.match(r"step-(\d{1,15})(?!\d)", entry.name)
            marks = [pointer for pointer, names in pointers.items() if entry.name in names]
            found.append(SavedCheckpoint(entry.name, int(numbered[1]) if numbered else None, _size(entry.path), marks))
    return sorted(found, key=lambda each: (-1 if each.step is None else each.step, each.name), reverse=True)


def checked_checkpoints(folder: RunFolder) -> list[dict[str, Any]]:
    """As plain values, with the result of a check of the manifest's hash and of the sizes of files: `complete`, what is
    wrong, or empty if that was not checked. `paceline checkpoint verify` also checks the hashes of all tensors."""
    found = saved_checkpoints(folder)
    checks = [_checked(folder.checkpoints / each.name) for each in found[:_MAX_CHECKED]]
    checks += [""] * (len(found) - len(checks))
    return [{**asdict(each), "check": check} for each, check in zip(found, checks, strict=True)]


def _checked(path: Path) -> str:
    try:
        changed = (path / _MANIFEST).lstat().st_mtime_ns
    except OSError:
        return "no manifest"
    return _check(path, changed)


@lru_cache(maxsize=1000)
def _check(path: Path, changed: int) -> str:
    """A page asks every second; `changed` is when the manifest was written."""
    try:
        body = regular_files.read_bytes(path / _MANIFEST, _MAX_MANIFEST + 1)
        if len(body) > _MAX_MANIFEST:
            return ""
        if regular_files.read_bytes(path / _DIGEST, 100).split()[:1] != [xxhash.xxh3_128_hexdigest(body).encode()]:
            return "manifest corrupted"
        for name, file in json.loads(body)["files"].items():
            if Path(name).name != name or (path / name).lstat().st_size != file["bytes"]:
                return "incomplete"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "incomplete"
    return "complete"


def _entries(path: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            yield from found
    except OSError:  # missing, or pruned by the run at this moment
        return


def _size(path: str) -> int:
    sizes = 0
    for entry in _entries(path):
        with suppress(OSError):
            sizes += entry.stat(follow_symlinks=False).st_size if entry.name not in (_MANIFEST, _DIGEST) else 0
    return sizes


def _names_in(pointer: Path) -> list[str]:
    try:
        return regular_files.read_bytes(pointer, _MAX_POINTER).decode(errors="replace").split()
    except OSError:
        return []
