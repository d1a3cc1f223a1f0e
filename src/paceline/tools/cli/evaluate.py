"""`paceline evaluate`: the evaluation loss and metrics of a recipe with the weights of a run."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config.launch import LaunchSpec
from paceline.errors import ConfigError, TrainError
from paceline.text import columns
from paceline.tools.cli import options, workloads

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

From = Annotated[
    str, typer.Option("--from", metavar="RUN", help="name or path of a run, a checkpoint, or a file of weights")
]
Best = Annotated[bool, typer.Option("--best", help="use the best checkpoint of the run, not the newest")]


@options.launch_options(without=("--nproc-per-node", "--nproc_per_node", "--k8s", "--k8s-with", "--dry-run"))
def evaluate(
    from_run: From,
    arguments: workloads.Arguments = None,
    best: Best = False,
    json: options.Json = False,
    **launch_options: Any,
) -> None:
    """Evaluate a recipe with the newest intact checkpoint of a run. Nothing is trained, and no file is written. Without
    a recipe, the run's own."""
    from paceline.config.recipe import Config
    from paceline.launcher.dispatch import dispatch
    from paceline.launcher.workload import Workload

    weights = find_weights(from_run, best=best)
    path, overrides = workloads.split_arguments(arguments or [])
    recipe = str(recipe_of(weights)) if path is None else path
    config, _ = workloads.read_recipe([recipe, *overrides], launch_options["ranks"])
    facts = {"ranks": workloads.ranks_of(config), "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS}
    spec = LaunchSpec.resolve(config, {**launch_options, **facts})
    values = {**config.model_dump(mode="json"), "train": {"max_steps": 1}, "init_from": None}
    request = json_format.dumps({"recipe": values, "weights": weights, "as_json": json})
    prepare = workloads.checked(Config.from_dict(values))
    workload = Workload.of_module(
        "paceline.tools.cli.evaluate", request, shared=workloads.TRAINER, prepare=prepare, name="paceline evaluate"
    )
    raise SystemExit(dispatch(workload, replace(spec, run=None, resume=None), sys.argv[1:]))


def find_weights(name: str, *, best: bool) -> str:
    """The path of a run, by its name or path, of its best checkpoint, of another checkpoint, or of a file."""
    from paceline.checkpoint.local_store import locate
    from paceline.checkpoint.reader import is_checkpoint
    from paceline.tools.watch.run_list import find_run

    path = Path(name).absolute()
    if not best and (path.is_file() or is_checkpoint(locate(path))):
        return str(path)
    run = find_run(name)
    return str(run.best if best else run.path)


def recipe_of(weights: str) -> Path:
    """The recipe of the run that weights belong to."""
    from paceline.run.folder import RunFolder

    for place in (Path(weights), *Path(weights).parents[:2]):
        if RunFolder(place).config.is_file():
            return RunFolder(place).config
    raise ConfigError(
        "missing-file", f"No recipe was given, and {weights} is not in a run folder.", fix="pass the recipe"
    )


# What belongs to training: files, and where weights come from.
_WITHOUT: dict[str, Any] = {
    "run": False, "resume": None, "init_from": None, "loggers": [], "profile": None, "save_every": None,
    "save_minutes": None, "save_best": None, "early_stop": None,
}  # fmt: skip


def main(request: str) -> None:
    """What every rank of a launch runs; on other nodes as a module with one argument."""
    _evaluate(**json_format.loads(request))


def _evaluate(recipe: Mapping[str, Any], weights: str, *, as_json: bool) -> None:
    """Evaluate the recipe's model with the weights of a run, a checkpoint or a file; rank 0 prints the result. With
    `as_json`, nothing else is printed to standard output."""
    from paceline.config.recipe import Config
    from paceline.data import adopt
    from paceline.train import recipe_objects
    from paceline.train.trainer import Trainer

    config = Config.from_dict({**recipe, **_WITHOUT})
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        val = recipe_objects.build_data(config)[1]
        if val is None:
            raise TrainError(
                "no-evaluation",
                "The data of the recipe has no evaluation set.",
                fix="return (training set, evaluation set) from the function that makes it",
            )
        trainer = Trainer.from_config(config)
        trainer.load_checkpoint(weights, weights_only=True)
        values = trainer._measure(adopt.sets_in(val, config.seed))
    if trainer.is_main_process:
        print(_shown(trainer, values, as_json), flush=True)


def _shown(trainer: Trainer, values: Mapping[str, float], as_json: bool) -> str:
    from paceline.run import folder

    source = trainer._restorer.loaded
    assert source is not None
    if as_json:
        metrics = {name: value if isfinite(value) else None for name, value in values.items()}
        found = {"checkpoint": folder.short(source.path), "step": source.step, "metrics": metrics}
        return json_format.dumps(found, indent=2)
    return columns([("checkpoint", str(source)), *((name, f"{value:.6g}") for name, value in values.items())])


if __name__ == "__main__":
    main(*sys.argv[1:])
