"""`paceline train`: run a recipe on one or more nodes."""

from __future__ import annotations

import sys
from typing import Any

from paceline.cli import options, workloads
from paceline.config.launch import LaunchSpec

CONTEXT = {"allow_interspersed_args": True}
EXAMPLES = options.examples(
    "train", "train recipe.yaml -n 4", "train recipe.yaml schedule=cosine optimizer.lr=3e-4 train.epochs=3"
)


@options.launch_options(without=("--nproc-per-node", "--nproc_per_node"))
def train(arguments: workloads.Arguments = None, **launch_options: Any) -> None:
    """Run a recipe; without one, the embedded default recipe, which runs on any machine."""
    from paceline.launcher.dispatch import dispatch

    config, name = workloads.read_recipe(arguments, launch_options["ranks"])
    run = None if config.run is False else config.run if isinstance(config.run, str) else name
    facts = {"ranks": workloads.ranks_of(config), "run": run, "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS}
    spec = LaunchSpec.resolve(config, {**launch_options, **facts})
    raise SystemExit(dispatch(workloads.recipe_workload(config), spec, sys.argv[1:]))
