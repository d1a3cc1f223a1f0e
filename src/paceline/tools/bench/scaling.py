"""How a recipe scales with the number of ranks: measured, predicted, and expected; and results of earlier times.

Efficiency is throughput per rank, relative to the first entry. Strong scaling keeps the batch; weak scaling keeps the
batch of each rank, and multiplies that of the step.

A prediction (plan/network_model.py) is made of what the same ranks measure separately: the computation of all of them
at once, without communication; when DDP has each of its buckets ready; and latency and bandwidth of the link.

Results are kept for comparison, as `runs/bench/scaling-gpt2-1f0c…/2026-11-16T16-03-02.json`. A folder holds those of
one recipe; one of other steps (another batch, model, layout) has its own.
"""

from __future__ import annotations

import json
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib.metadata import version
from math import isinf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline import __version__
from paceline.plan.network_model import EXPECTED, LinkModel, exposed_after, free_cores
from paceline.run import folder, regular_files
from paceline.text import format_bytes, plural
from paceline.tools.bench.step_report import COMMUNICATION, LOGGING, StepReport, Times, total
from paceline.tools.watch.run_facts import read_object
from paceline.tools.watch.sheet import ChartAxis, Part, Series, line_chart, page, paragraph, table

MODES = ("strong", "weak")


@dataclass(frozen=True)
class ScalingEntry:
    """One number of ranks, in seconds and bytes. Of one that failed, only `failed` is known."""

    mode: str  # strong or weak
    ranks: int
    batch: int = 0
    step: float = 0.0
    memory: int = 0  # peak of the rank that has most
    exposed: float | None = None  # communication that the step waits for
    communication: float | None = None  # of all buckets, by the link
    predicted: float | None = None
    link: LinkModel | None = None
    note: str = ""  # why there is no prediction
    failed: str = ""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.batch / self.step

    @property
    def hidden(self) -> float | None:
        """The share of communication during which ranks compute."""
        if self.exposed is None or not self.communication:
            return None
        return max(0.0, 1.0 - self.exposed / self.communication)

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to the measured step."""
        return None if self.predicted is None else self.predicted / self.step - 1.0

    def to_json(self) -> dict[str, Any]:
        if self.failed:
            return {"mode": self.mode, "ranks": self.ranks, "failed": self.failed}
        values = {name: value for name, value in asdict(self).items() if name != "failed"}
        if self.link is not None and isinf(self.link.bandwidth):  # JSON has no infinity
            values["link"]["bandwidth"] = None
        return {**values, "samples_per_second": self.rate, "hidden": self.hidden, "error": self.error}

    @classmethod
    def of(cls, mode: str, measured: Mapping[str, Any]) -> ScalingEntry:
        """From a measurement of `recipe_run.measure`."""
        entry = cls(
            mode,
            measured["ranks"],
            measured["batch"],
            StepReport.of(measured["steps"]).step,
            max(measured["memory"]),
            note=measured["unpredictable"] if measured["ranks"] > 1 else "",
        )
        if "link" not in measured:
            return entry
        link, ranks = LinkModel(**measured["link"]), entry.ranks
        times = [link.all_reduce_time(size, ranks) for _, size in measured["buckets"]]
        overlap = 1.0 if measured["device"] != "cpu" else free_cores(measured["cores"], measured["local_ranks"])
        alone = waiting(measured["compute"])  # of DDP itself
        return replace(
            entry,
            exposed=max(0.0, waiting(measured["steps"]) - alone),
            communication=sum(times),
            predicted=slowest(measured["compute"])
            + exposed_after([lead for lead, _ in measured["buckets"]], times, overlap),
            link=link,
        )


def slowest(ranks: Sequence[Sequence[Times]]) -> float:
    """The median over steps of the time of the slowest rank, for which the others would wait; with the mean of log
    points, each on the rank that waits least in it."""
    totals = [[total(step) - step.get(LOGGING, 0.0) for step in steps] for steps in ranks]
    logging = fmean(min(step.get(LOGGING, 0.0) for step in same) for same in zip(*ranks, strict=True))
    return logging + float(median(max(step) for step in zip(*totals, strict=True)))


def waiting(ranks: Sequence[Sequence[Times]]) -> float:
    """The median over steps of the communication on the rank that waits least: the others wait for it as well."""
    each = [[step.get(COMMUNICATION, 0.0) for step in steps] for steps in ranks]
    return float(median(min(step) for step in zip(*each, strict=True)))


def heading(mode: str, entries: Sequence[ScalingEntry]) -> str:
    first = next((entry for entry in entries if entry.mode == mode and not entry.failed), None)
    if first is None:
        return f"{mode} scaling: no figures"
    batch = f"{first.batch}" if mode == "strong" else f"{first.batch / first.ranks:g} per rank"
    return f"{mode} scaling: batch {batch}"


def rows(mode: str, entries: Sequence[ScalingEntry], before: Mapping[str, Any] | None) -> list[list[str]]:
    """The table of one mode. `before`: an earlier result."""
    old = _rates(before)
    head = ["ranks", "ms/step", "samples/s", "efficiency", "expected", "memory", "hidden", "predicted", "error"]
    found = [head + ["change"] * bool(old)]
    good = [entry for entry in entries if entry.mode == mode and not entry.failed]
    for entry in good:
        row = [
            str(entry.ranks),
            f"{entry.step * 1e3:.2f}",
            f"{entry.rate:.1f}",
            _percent(entry.rate / entry.ranks / (good[0].rate / good[0].ranks)),
            _expected(entry.ranks) if good[0].ranks == 1 else "–",
            format_bytes(entry.memory),
            _percent(entry.hidden),
            "–" if entry.predicted is None else f"{entry.predicted * 1e3:.2f}",
            _percent(entry.error, signed=True),
        ]
        rate = old.get((mode, entry.ranks))
        found.append(row + [_percent(rate and entry.rate / rate - 1, signed=True)] * bool(old))
    return found


def notes(entries: Sequence[ScalingEntry], before: Mapping[str, Any] | None) -> list[str]:
    """What a reader of the tables should know, and what failed."""
    found = [
        f"failed: {plural(entry.ranks, 'rank')} ({entry.mode}): {entry.failed}" for entry in entries if entry.failed
    ]
    errors = [abs(entry.error) for entry in entries if entry.error is not None]
    if errors:
        found.append(f"predictions are at most {100 * max(errors):.1f} % off")
    for ranks, link in {entry.ranks: entry.link for entry in entries if entry.link is not None}.items():
        bandwidth = "no bandwidth shows" if isinf(link.bandwidth) else f"{link.bandwidth / 1e9:.2f} GB/s"
        found.append(f"link of {ranks} ranks: {link.latency * 1e6:.0f} µs, {bandwidth}")
    found += [f"no prediction: {reason}" for reason in dict.fromkeys(entry.note for entry in entries if entry.note)]
    if len(entries) > 1:
        found.append(
            "expected: the efficiency usually expected of GPUs; memory: peak of a rank; hidden: share of "
            "communication during which ranks compute; predicted: ms/step"
        )
    if before is not None:
        found.append(f"change: samples/s since {before['date']} on {before['host']}")
    return found


def _rates(result: Mapping[str, Any] | None) -> dict[tuple[str, int], float]:
    """Samples per second of a stored result, by mode and ranks."""
    entries = [] if result is None else result["entries"]
    return {(each["mode"], each["ranks"]): each["samples_per_second"] for each in entries if "failed" not in each}


def _expected(ranks: int) -> str:
    if ranks not in EXPECTED:
        return "–"
    low, high = (100 * speed / ranks for speed in EXPECTED[ranks])
    return f"{low:.0f}–{high:.0f} %"


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return "–"
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.0f} %"


Table = tuple[str, Sequence[Sequence[str]]]  # its heading, and rows


def scaling_page(title: str, entries: Sequence[ScalingEntry], tables: Sequence[Table], notes: Sequence[str]) -> str:
    parts = []
    for mode, (heading, cells) in zip(dict.fromkeys(entry.mode for entry in entries), tables, strict=True):
        good = [entry for entry in entries if entry.mode == mode and not entry.failed]
        parts += [_speed_chart(heading, good), table(cells)] if good else []
    return page(title, [*parts, *map(paragraph, notes)])


def _speed_chart(heading: str, entries: Sequence[ScalingEntry]) -> Part:
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


RESULTS = folder.ROOT / "bench"


def folder_of(kind: str, name: str, digest: str) -> Path:
    return RESULTS / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{digest}"


def newest(at: Path) -> dict[str, Any] | None:
    """The last result in a folder; None if there is none that can be read."""
    return next(filter(None, map(read_object, sorted(at.glob("*.json"), reverse=True))), None)


def store(at: Path, values: Mapping[str, Any]) -> Path:
    """Write a result, with where and when it was measured."""
    now = datetime.now()
    facts = {
        "date": now.isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"paceline": __version__, "torch": version("torch"), "python": platform.python_version()},
    }
    at.mkdir(parents=True, exist_ok=True)
    path = at / f"{now:%Y-%m-%dT%H-%M-%S}.json"
    regular_files.replace(path, json.dumps({**facts, **values}, indent=1).encode())
    return path
