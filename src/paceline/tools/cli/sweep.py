"""`paceline sweep`: search for good settings with many runs of a recipe, and `paceline sweep show`."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.config.launch import LaunchSpec
from paceline.tools.cli import options, workloads

_option = partial(typer.Option, rich_help_panel="Search")


class _SweepGroup(TyperGroup):
    """`paceline sweep RECIPE` is `paceline sweep run RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_SweepGroup,
    no_args_is_help=True,
    help="Search for good settings with many runs of a recipe.",
    epilog=options.examples("sweep"),
)

Trials = Annotated[int | None, _option("--trials", min=1, help="number of trials")]
Parallel = Annotated[int | None, _option("--parallel", min=1, help="trials at a time; default: what GPUs allow, or 1")]
Sampler = Annotated[
    str | None, _option("--sampler", metavar="tpe | random | grid | cmaes", help="how values are chosen; default: tpe")
]
Pruner = Annotated[
    str | None, _option("--pruner", metavar="none | median | asha", help="which trials end early; default: none")
]
Metric = Annotated[str | None, _option("--metric", help="metric of the evaluation; default: loss")]
Mode = Annotated[str | None, _option("--mode", metavar="min | max", help="which is better; default: by the metric")]
Minutes = Annotated[float | None, _option("--minutes", help="start no trial after this time")]
Seed = Annotated[int | None, _option("--seed", min=0, help="seed of the sampler")]
Name = Annotated[str | None, _option("--name", help="name or path of the study; default: RECIPE-sweep")]


@app.command("run", cls=options.HintedCommand, epilog=options.examples("sweep"))
@options.launch_options(
    without=("--nproc-per-node", "--nproc_per_node", "--dry-run", "--k8s", "--k8s-with", "--nodes", "--nnodes",
             "--node-rank", "--node_rank", "--master", "--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-backend",
             "--rdzv_backend", "--slurm", "--tee")
)  # fmt: skip
def run(
    arguments: workloads.Arguments = None,
    trials: Trials = None,
    parallel: Parallel = None,
    sampler: Sampler = None,
    pruner: Pruner = None,
    metric: Metric = None,
    mode: Mode = None,
    minutes: Minutes = None,
    seed: Seed = None,
    name: Name = None,
    **launch_options: Any,
) -> None:
    """Run many trials of a recipe with other values, and continue a search that was interrupted. This is the default:
    `paceline sweep RECIPE` is the same."""
    given = {"trials": trials, "parallel": parallel, "sampler": sampler, "pruner": pruner, "metric": metric,
             "mode": mode, "minutes": minutes, "seed": seed}  # fmt: skip
    from paceline.tools.search import recipe_trials
    from paceline.tools.search.space import split_overrides

    plain, space = split_overrides(arguments or [])
    plain += [f"sweep.{key}={value}" for key, value in given.items() if value is not None]
    config, recipe = workloads.read_recipe(plain, launch_options["ranks"])
    section = config.sweep.model_copy(update={"space": {**config.sweep.space, **space}})
    spec = LaunchSpec.resolve(config, {**launch_options, "ranks": workloads.ranks_of(config) or 1})
    study = recipe_trials.open_recipe_study(config, section, name or f"{recipe}-sweep", spec.ranks or 1)
    status = recipe_trials.run_recipe_sweep(study, replace(spec, run=None, tee=()))
    if status:
        raise SystemExit(status)
    _show(study, html=False)
    study.require_success()


@app.command("show", epilog=options.examples("sweep show"))
def show(
    study: Annotated[str, typer.Argument(help="name or path of a study")],
    html: Annotated[bool, typer.Option("--html", help="also write charts of all trials as one HTML file")] = False,
) -> None:
    """Show the best trials, the importance of parameters and learning curves; write the best recipe."""
    from paceline.run.study_folder import StudyFolder
    from paceline.tools.search.study import Study

    _show(Study.load(StudyFolder.of(study)), html=html)


def _show(study: Any, *, html: bool) -> None:
    from paceline.run.folder import short
    from paceline.tools.search import results

    best = results.write_best(study)
    print(results.summary(study))
    if best is not None and study.recipe:
        print(f"\nbest recipe: {short(study.folder.best_recipe)} (paceline train {short(study.folder.best_recipe)})")
    if html:
        results.write_html(study)
        print(f"charts: {short(study.folder.report)}")
    sys.stdout.flush()
