"""`paceline train`: run a recipe on one or more nodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.cli import options, workloads
from paceline.config.launch import LaunchSpec
from paceline.launcher.workload import reject_launch_on_rank
from paceline.runtime import environment

if TYPE_CHECKING:
    from paceline.config.recipe import Config

CONTEXT = {"allow_interspersed_args": True}
EXAMPLES = options.examples(
    "train", "train recipe.yaml -n 4", "train recipe.yaml schedule=cosine optimizer.lr=3e-4 train.epochs=3"
)


@options.launch_options(without=("--nproc-per-node", "--nproc_per_node"))
def train(arguments: workloads.Arguments = None, **launch_options: Any) -> None:
    """Run a recipe; without one, the embedded default recipe, which runs on any machine."""
    from paceline.launcher.dispatch import dispatch

    config, name = workloads.read_recipe(arguments, launch_options["ranks"])
    if environment.is_rank():  # under torchrun, this process is a rank already
        _join(config if config.run is not None else config.model_copy(update={"run": name}), launch_options)
        return
    run = None if config.run is False else config.run if isinstance(config.run, str) else name
    facts = {"ranks": workloads.ranks_of(config), "run": run, "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS}
    spec = LaunchSpec.resolve(config, {**launch_options, **facts})
    raise SystemExit(dispatch(workloads.recipe_workload(config), spec, sys.argv[1:]))


def _join(config: Config, launch_options: Mapping[str, Any]) -> None:
    """Train as a rank of the world that another launcher started."""
    world = (environment.read_rank_info() or environment.RankInfo()).world
    given = [name for name, value in launch_options.items() if value not in (None, False, [], ()) and name != "ranks"]
    if given or launch_options["ranks"] not in (None, world):
        reject_launch_on_rank("paceline train with launch options")
    workload = workloads.recipe_workload(config)
    workload.prepare(world)
    workload.body()
