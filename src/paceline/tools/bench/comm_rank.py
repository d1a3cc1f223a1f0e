"""What each rank of `paceline bench comm` runs: `python -m paceline.tools.bench.comm_rank REQUEST` (comm_request.py).

Rank 0 reports, so that the command works with every launch backend: its output is shown wherever the command was
started, or in the log of a job. Files are written in the working directory of its node.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import isinf
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.config.recipe import Config
from paceline.plan import sync_advice
from paceline.plan.network_model import LinkModel, bare
from paceline.runtime import collectives, process_group
from paceline.runtime.process_group import World
from paceline.text import columns, format_rate, plural
from paceline.tools.bench.collective_times import CollectiveTimes, measure
from paceline.tools.bench.comm_request import CommRequest, format_size, require_peers
from paceline.tools.bench.recipe_run import RecipeRun, unpredictable
from paceline.tools.bench.scaling import slowest
from paceline.tools.watch import sheet
from paceline.tools.watch.sheet import ChartAxis, Series, line_chart, paragraph

_STEPS = 10  # of a recipe, to advise on its `sync`
_NO_ADVICE: Mapping[str, Any] = {"sentence": "", "compute": None, "methods": []}


def main(text: str) -> None:
    request = CommRequest.from_text(text)
    require_peers(process_group.current_rank_info().world)
    world = process_group.init_world(device=request.device, backend=request.backend)
    shows = world.is_main and request.json != "-"
    report: dict[str, Any] = _setting(world)
    if shows:
        _say(report["setting"])
    for name in request.collectives:
        report["collectives"][name] = entry(measure(name, request.sizes, world.device, request.seconds))
        if shows:
            _say("\n" + describe(name, report["collectives"][name]))
    if request.recipe is not None:
        links = {name: link_of(entry) for name, entry in report["collectives"].items()}
        report["advice"] = advise(Config.from_dict(request.recipe), links)
        if shows:
            _say("\n" + describe_advice(report["advice"]))
    if world.is_main:
        _write(report, request, world)
    collectives.barrier()


def advise(config: Config, links: Mapping[str, LinkModel | None]) -> dict[str, Any]:
    """Run steps of a recipe without `sync` on all ranks, without communication, and compare what methods add to them.
    Collective: must be called on every rank. Plain values, equal on every rank."""
    run = RecipeRun(bare(config))
    trainer = run.trainer
    if reason := unpredictable(trainer):
        return {**_NO_ADVICE, "sentence": f"no advice: sync reduces the gradients of ddp, and {reason}"}
    fits = {name: link for name, link in links.items() if link is not None}
    if "all_reduce" not in fits:
        sizes = "the measured sizes of all_reduce are too few or too small (--sizes, --seconds)"
        return {**_NO_ADVICE, "sentence": f"no advice: {sizes}"}
    shapes = [tuple(each.shape) for each in trainer.model.parameters() if each.requires_grad]
    run.warm_up(reduces=False)
    run.measure(_STEPS)
    compute, buckets = slowest(collectives.all_gather_object(run.steps)), collectives.broadcast_object(run.buckets)
    costs = sync_advice.compare(shapes, compute=compute, buckets=buckets, links=fits, ranks=trainer.world.size)
    return {
        "sentence": sync_advice.sentence(costs, fits["all_reduce"]),
        "compute": compute,
        "methods": [asdict(cost) for cost in costs],
    }


def _setting(world: World) -> dict[str, Any]:
    """The head of a report. Collective."""
    hosts = sorted(set(collectives.all_gather_object(socket.gethostname())))
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    where = f"{plural(world.size, 'rank')} on {plural(world.rank_info.nodes, 'node')}"
    return {
        "version": VERSION,
        "kind": "comm",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": world.size,
        "nodes": world.rank_info.nodes,
        "hosts": hosts,
        "backend": world.backend,
        "device": device,
        "versions": {"paceline": __version__, "torch": torch.__version__},
        "setting": f"{where}, {world.backend}, {device}",
        "collectives": {},
        "advice": None,
    }


def _write(report: dict[str, Any], request: CommRequest, world: World) -> None:
    where = f" on {socket.gethostname()}" if world.rank_info.nodes > 1 else ""
    text = json.dumps(report, indent=1)
    if request.json == "-":
        _say(text)
    for name, content in ((request.json, text), (request.html, html(report))):
        if name not in (None, "-"):
            Path(name).write_text(content)
            print(f"written{where}: {name}", file=sys.stderr, flush=True)  # noqa: T201


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])


VERSION = 1
_COMPUTE = "predicted from the fits and a step that computes for {:.1f} ms; without the time that compression takes"
_HEAD = ("size", "time", "algorithm bandwidth", "bus bandwidth")


def entry(times: CollectiveTimes) -> dict[str, Any]:
    """A collective as plain values: seconds, bytes and bytes per second."""
    bandwidths = ("algorithm_bandwidth", "bus_bandwidth")
    points = [
        {"bytes": each.size, "seconds": each.seconds, **{name: getattr(each, name) for name in bandwidths}}
        for each in times.timings
    ]
    link = None
    if len(points) > 1:
        ranks = times.timings[0].ranks
        link = LinkModel.fit(times.collective, ranks, [(each.size, each.seconds) for each in times.timings])
    if link is None or isinf(link.bandwidth):
        no_fit = "no fit: the sizes show no bandwidth; add larger ones (--sizes), or repeat on an idle machine"
        note = "; ".join(filter(None, [times.note, no_fit]))
        return {"points": points, "model": None, "note": note}
    return {"points": points, "model": asdict(link), "note": times.note}


def link_of(entry: Mapping[str, Any]) -> LinkModel | None:
    return None if entry["model"] is None else LinkModel(**entry["model"])


def describe(collective: str, entry: Mapping[str, Any]) -> str:
    """The table of a collective, with its fit and its note."""
    table = _table([_HEAD, *(_row(point) for point in entry["points"])])
    return "\n".join(filter(None, [collective, table, describe_fit(entry), entry["note"]]))


def describe_fit(entry: Mapping[str, Any]) -> str:
    """`fitted: 45 µs per round + bytes / 24.1MB/s, within 8 %`"""
    link = link_of(entry)
    if link is None:
        return ""
    latency, bandwidth = _microseconds(link.latency), f"{format_rate(link.bandwidth)}B/s"
    return f"fitted: {latency} per round, {bandwidth}; within {100 * link.worst_error:.0f} % of every size"


def describe_advice(advice: Mapping[str, Any]) -> str:
    """A sentence, and what each method would cost."""
    if not advice["methods"]:
        return str(advice["sentence"])
    return f"{_table(_methods(advice))}\n{_COMPUTE.format(advice['compute'] * 1e3)}\n\n{advice['sentence']}"


def _methods(advice: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        (each["name"], format_size(each["sent"]), f"{each['seconds'] * 1e3:,.1f} ms", f"{100 * each['waits']:.0f} %")
        for each in advice["methods"]
    ]
    return [("method", "sent per step", "waits", "of the step"), *rows]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows])


def _row(point: Mapping[str, float]) -> tuple[str, ...]:
    rates = (f"{format_rate(point[name])}B/s" for name in ("algorithm_bandwidth", "bus_bandwidth"))
    return (format_size(point["bytes"]), _microseconds(point["seconds"]), *rates)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds >= 10e-6 else f"{seconds * 1e6:.1f} µs"


def html(report: Mapping[str, Any]) -> str:
    """A page with charts of time and bus bandwidth, and all tables."""
    found: Mapping[str, Mapping[str, Any]] = {
        name: each for name, each in report["collectives"].items() if each["points"]
    }
    size = ChartAxis("message size", log=4, unit="bytes")
    fits = [
        Series(name, _points(each, "seconds"), _fitted(name, each, report["ranks"]), dashed=True)
        for name, each in found.items()
    ]
    title = "Time (dots: measured; dashed: fitted latency + bandwidth)"
    time = line_chart(title, fits, x=size, y=ChartAxis("time", log=10, unit="seconds"))
    rates = [(name, _points(each, "bus_bandwidth")) for name, each in found.items()]
    measured = [Series(name, points, points) for name, points in rates]
    bandwidth = line_chart("Bus bandwidth", measured, x=size, y=ChartAxis("bandwidth", log=10, unit="rate"))
    parts = [paragraph(report["setting"]), time, bandwidth]
    if (advice := report["advice"]) is not None:
        parts += [sheet.table(_methods(advice), "sync")] if advice["methods"] else []
        parts += [paragraph(_COMPUTE.format(advice["compute"] * 1e3))] if advice["methods"] else []
        parts.append(paragraph(advice["sentence"]))
    for name, each in found.items():
        notes = " ".join(filter(None, [describe_fit(each), each["note"]]))
        parts += [sheet.table([_HEAD, *(_row(point) for point in each["points"])], name), paragraph(notes)]
    return sheet.page(f"Collectives on {plural(report['ranks'], 'rank')}", parts)


def _points(entry: Mapping[str, Any], value: str) -> list[tuple[float, float]]:
    return [(point["bytes"], point[value]) for point in entry["points"]]


def _fitted(collective: str, entry: Mapping[str, Any], ranks: int) -> list[tuple[float, float]]:
    """The model over the measured range, between sizes as well: its knee is between two of them."""
    link, sizes = link_of(entry), [point["bytes"] for point in entry["points"]]
    if link is None:
        return []
    steps = 40
    grid: Sequence[float] = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / steps) for step in range(steps + 1)]
    return [(size, link.time(collective, size, ranks)) for size in grid]
