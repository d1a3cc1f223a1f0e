"""Advice on `sync:` for a recipe, from the measured network and its measured computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline.bench.recipe_run import RecipeRun, unpredictable
from paceline.bench.scaling import slowest
from paceline.config.recipe import Config
from paceline.plan import sync_advice
from paceline.plan.network_model import LinkModel
from paceline.plan.scaling_model import bare
from paceline.runtime import collectives

_STEPS = 10


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
