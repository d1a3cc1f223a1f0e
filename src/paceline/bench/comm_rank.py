"""What each rank of `paceline bench comm` runs: `python -m paceline.bench.comm_rank REQUEST` (comm_request.py).

Rank 0 reports, so that the command works with every launch backend: its output is shown wherever the command was
started, or in the log of a job. Files are written in the working directory of its node.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.bench import comm_report
from paceline.bench.collective_times import measure
from paceline.bench.comm_request import CommRequest, require_peers
from paceline.bench.recipe_run import RecipeRun, unpredictable
from paceline.bench.scaling import slowest
from paceline.config.recipe import Config
from paceline.plan import sync_advice
from paceline.plan.network_model import LinkModel, bare
from paceline.runtime import collectives, process_group
from paceline.runtime.process_group import World
from paceline.text import plural

_STEPS = 10  # of a recipe, to advise on its `sync`


def main(request: CommRequest) -> None:
    require_peers(process_group.current_rank_info().world)
    world = process_group.init_world(device=request.device, backend=request.backend)
    shows = world.is_main and request.json != "-"
    report: dict[str, Any] = _setting(world)
    if shows:
        _say(report["setting"])
    for name in request.collectives:
        report["collectives"][name] = comm_report.entry(measure(name, request.sizes, world.device, request.seconds))
        if shows:
            _say("\n" + comm_report.describe(name, report["collectives"][name]))
    if request.recipe is not None:
        links = {name: comm_report.link_of(entry) for name, entry in report["collectives"].items()}
        report["advice"] = advise(Config.from_dict(request.recipe), links)
        if shows:
            _say("\n" + comm_report.describe_advice(report["advice"]))
    if world.is_main:
        _write(report, request, world)
    collectives.barrier()


def advise(config: Config, links: Mapping[str, LinkModel | None]) -> dict[str, Any]:
    """Run steps of a recipe without `sync` on all ranks, without communication, and compare what methods add to them.
    Collective: must be called on every rank. Plain values, equal on every rank."""
    run = RecipeRun(bare(config))
    trainer = run.trainer
    if reason := unpredictable(trainer):
        return _nothing(f"no advice: sync reduces the gradients of ddp, and {reason}")
    fits = {name: link for name, link in links.items() if link is not None}
    if "all_reduce" not in fits:
        return _nothing("no advice: the measured sizes of all_reduce are too few or too small (--sizes, --seconds)")
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


def _nothing(sentence: str) -> dict[str, Any]:
    return {"sentence": sentence, "compute": None, "methods": []}


def _setting(world: World) -> dict[str, Any]:
    """The head of a report. Collective."""
    hosts = sorted(set(collectives.all_gather_object(socket.gethostname())))
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    where = f"{plural(world.size, 'rank')} on {plural(world.rank_info.nodes, 'node')}"
    return {
        "version": comm_report.VERSION,
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
    for name, content in ((request.json, text), (request.html, comm_report.html(report))):
        if name not in (None, "-"):
            Path(name).write_text(content)
            print(f"written{where}: {name}", file=sys.stderr, flush=True)  # noqa: T201


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(CommRequest.from_text(sys.argv[1]))
