"""The runs that a page can show: those of its list, and those that it follows.

A line of the list is read from the end of a run's metrics. What its columns show in addition needs all metrics and the
recipe, and follows in later answers, for as many runs as can be read in a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.run.folder import RunFolder
from paceline.tools.watch import page_values, run_list
from paceline.tools.watch.live_run import LiveRun
from paceline.tools.watch.metric_series import MetricSeries, finite, read_metrics, thin
from paceline.tools.watch.plain_text import clean
from paceline.tools.watch.run_facts import best_metric, file_stamp, read_facts, recipe_entries, value_text

_MAX_RUNS, _MAX_FOLLOWED = 1000, 40  # those that are listed, and those whose curves are held
_MAX_POINTS = 10_000_000  # of the followed runs: 160 MB
_SECONDS_OF_AN_ANSWER = 0.3  # for columns
_REST = 30  # the columns of a run that trains are read again after so many times as long as that took
_MAX_METRICS, _MAX_SETTINGS, _SPARKLINE = 60, 100, 30


class ListedRun:
    def __init__(self, folder: RunFolder, number: str, name: str) -> None:
        self.folder = folder
        self.values: dict[str, Any] = {"id": number, "name": clean(name, 80)}
        self.version = 0  # when the values last changed
        self._stamps: dict[str, Any] = {}
        self._read_again = 0.0

    def read_line(self, version: int) -> None:
        if self._is_changed("metrics", "ledger", "lock") or self.values["state"] == "running":
            values = run_list.run_values(read_facts(self.folder, quick=True))
            texts = {name: clean(value) for name, value in values.items() if isinstance(value, str)}
            self._set({**values, **texts}, version)

    def read_columns(self, defaults: dict[str, str], version: int) -> None:
        """`defaults` of recipes: those that are not known yet are added."""
        began = time.monotonic()
        if began < self._read_again or not self._is_changed("metrics", "config"):
            return
        metrics, entries = read_metrics(self.folder), recipe_entries(self.folder)
        recipe = {key: value for key, value, _ in entries or []}
        chosen, curves = best_metric(recipe), page_values.named_curves(metrics)
        curve = next((name for name in (page_values.evaluation_name(chosen[0]), "loss") if name in curves), "loss")
        texts = [(clean(key, 80), value_text(value, 80), origin) for key, value, origin in entries or []]
        own = [row[:2] for row in texts if row[2] != "default" or defaults.setdefault(row[0], row[1]) != row[1]]
        columns = {
            "settings": None if entries is None else dict(own[:_MAX_SETTINGS]),
            "tags": page_values.tags(recipe),
            "last": {name: finite(each.last) for name, each in list(curves.items())[:_MAX_METRICS]},
            "best": page_values.best_values(metrics, chosen),
            "curve": curve,
            "sparkline": thin(curves.get(curve, MetricSeries()), 0, 1 << 53, _SPARKLINE)["y"],
        }
        self._set(columns, version)
        self._read_again = time.monotonic() + _REST * (time.monotonic() - began)

    def _is_changed(self, *files: str) -> bool:
        """Whether these files have changed since it was last asked: a list may have hundreds of runs."""
        before, stamps = self._stamps.get(files[-1]), [file_stamp(getattr(self.folder, name)) for name in files]
        self._stamps[files[-1]] = stamps
        return before != stamps

    def _set(self, values: dict[str, Any], version: int) -> None:
        if not values.items() <= self.values.items():
            self.values, self.version = {**self.values, **values}, version


class WatchedRuns:
    """The runs that were asked for, or all of a folder. Methods may be called from any thread."""

    def __init__(self, chosen: Sequence[RunFolder], root: Path, sweep: Callable[[], dict[str, Any]] = dict) -> None:
        """`sweep`: what the page of the sweep shows whose trials these are."""
        self._root, self._chosen, self.sweep = root.absolute(), list(chosen), sweep
        self._runs: dict[Path, ListedRun] = {}
        self._followed: dict[str, LiveRun] = {}
        self._defaults: dict[str, str] = {}
        self._version = 0
        self._listing, self._finding = threading.Lock(), threading.Lock()  # large runs of a list take a moment

    def listed(self, known: int = 0) -> dict[str, Any]:
        """The latest first; of those that have not changed since the version `known`, only their ids."""
        with self._listing:
            self._version += 1
            runs = [self._run(path) for path in self._paths()[:_MAX_RUNS]]
            for run in runs:
                run.read_line(self._version)
            runs.sort(key=lambda run: -run.values["updated"])
            end = time.monotonic() + _SECONDS_OF_AN_ANSWER * (known > 0)  # the first answer must not wait
            for run in runs:
                if time.monotonic() < end:
                    run.read_columns(self._defaults, self._version)
            return {
                "runs": [run.values if run.version > known else {"id": run.values["id"]} for run in runs],
                "chosen": [self._run(folder.path).values["id"] for folder in self._chosen],
                "defaults": self._defaults,
                "version": self._version,
                "now": time.time(),
            }

    def _paths(self) -> list[Path]:
        if self._chosen:
            return [folder.path for folder in self._chosen]
        return run_list.trial_paths(self._root) if run_list.is_study(self._root) else run_list.run_paths(self._root)

    def _run(self, path: Path) -> ListedRun:
        if path not in self._runs:
            name = path.name if self._chosen else str(path.relative_to(self._root))
            self._runs[path] = ListedRun(RunFolder(path), str(len(self._runs)), name)
        return self._runs[path]

    def find(self, number: str) -> LiveRun | None:
        with self._finding:
            folder = next((run.folder for run in list(self._runs.values()) if run.values["id"] == number), None)
            if folder is None:
                return None
            found = self._followed.pop(number, None) or LiveRun(folder)
            self._followed[number] = found  # now the last one
            while len(self._followed) > _MAX_FOLLOWED or (
                len(self._followed) > 1 and sum(each.points for each in self._followed.values()) > _MAX_POINTS
            ):
                del self._followed[next(iter(self._followed))]
            return found
