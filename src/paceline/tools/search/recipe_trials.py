"""Trials of a recipe: each is a launch of the recipe with other values, in a run folder of its own, and is resumed
from its last checkpoint if it was interrupted or paused."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.config.launch import LaunchSpec
from paceline.config.recipe import Config
from paceline.config.sections import SweepSection
from paceline.errors import ConfigError, SearchError, did_you_mean
from paceline.launcher.dispatch import dispatch
from paceline.launcher.workload import Workload
from paceline.run.folder import RunFolder
from paceline.run.study_folder import StudyFolder
from paceline.runtime.processes import call_in_child
from paceline.tools.search.placement import Pool, TrialSlot, open_pool
from paceline.tools.search.scheduler import Sweep
from paceline.tools.search.space import Parameter, grid_size, parse_space, set_key
from paceline.tools.search.study import Study
from paceline.tools.search.trial import Trial

_SAMPLES = 8  # that are evaluated to learn the names of metrics


class RecipeTrials:
    """Starts trials of a recipe. `values` are those of the recipe, without its `sweep:` section."""

    def __init__(self, values: Mapping[str, Any], spec: LaunchSpec, threads: int = 1) -> None:
        self._values, self._spec, self._threads = values, spec, threads

    def config(self, params: Mapping[str, Any], **more: Any) -> Config:
        """The recipe of a trial."""
        values = dict(self._values)
        for key, value in {**params, **more}.items():
            set_key(values, key.split("."), value)
        return Config.from_dict(values, origin="the search space")

    def check(self, space: Sequence[Parameter], metric: str, ranks: int) -> None:
        """Find errors before the first trial: in the bounds and choices of every parameter, and in the metric."""
        from paceline.train.recipe_objects import check

        first = {parameter.key: parameter.extremes[0] for parameter in space}
        for key, parameter in zip(first, space, strict=True):
            if key.split(".")[0] in ("run", "resume", "sweep", "launch"):
                raise SearchError("bad-space", f"Invalid search space: {key} can't vary between trials.")
            for value in parameter.extremes:
                check(self.config({**first, parameter.key: value}), ranks)
        _require_metric(self.config(first, run=False, quiet=True), metric)

    def body(self, trial: Trial, folder: RunFolder, slot: TrialSlot, fraction: float | None) -> int:
        """In the process of a trial: train it to a fraction of its steps, or to the end. Returns the exit status."""
        import torch

        if folder.path.is_dir() and not folder.has_run:
            shutil.rmtree(folder.path)  # it was killed before it had written anything
        torch.set_num_threads(self._threads)
        more = {"run": str(folder.path), "resume": "auto", "train.pause_at": fraction, "save_last": True}
        config = self.config(trial.params, **more)
        spec = replace(self._spec, run=str(folder.path), resume="auto")
        return dispatch(_workload(config), slot.options(spec), ["train"])


def _workload(config: Config) -> Workload:
    def body() -> None:
        from paceline.train.trainer import Trainer

        Trainer.from_config(config).train()

    def prepare(world: int) -> None:
        from paceline.train.recipe_objects import check

        check(config, world)

    return Workload(body, "paceline.train.trainer", prepare, recipe=config.model_dump(mode="json"))


def preload() -> None:
    """Imports that all trials share."""
    import paceline.train.trainer  # noqa: F401


def _require_metric(config: Config, metric: str) -> None:
    """Raise if evaluations do not report the metric: those of an untrained model tell."""
    if metric == "loss":
        return
    try:
        names = call_in_child(lambda: _reported_metrics(config))
    except RuntimeError as error:
        raise SearchError("no-metric", f"The recipe can't be evaluated: {error}") from None
    if metric not in names:
        raise SearchError(
            "no-metric",
            f"No trial reports the metric {metric!r}.",
            why="it is none of the metrics of the evaluation of this recipe",
            fix=did_you_mean(metric, names),
        )


def _reported_metrics(config: Config) -> list[str]:
    """The names in an evaluation of some samples, on one rank."""
    from torch.utils.data import Subset

    from paceline.data import adopt
    from paceline.train import recipe_objects
    from paceline.train.trainer import Trainer

    alone = dict[str, Any](strategy="single", layout=None, run=False, quiet=True, compile=False, loggers=[])
    trainer = Trainer.from_config(config.model_copy(update=alone))
    _, val = recipe_objects.build_data(config)
    sets = {
        prefix: Subset(each, range(min(len(each), _SAMPLES))) if hasattr(each, "__getitem__") else each
        for prefix, each in adopt.sets_in(val, config.seed).items()
    }
    return list(trainer._measure(sets)) if sets else ["loss"]


def recipe_values(config: Config) -> dict[str, Any]:
    """What a recipe sets, without the search itself."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    for section in ("sweep", "launch"):
        values.pop(section, None)  # what is searched, and where, is not part of what is trained
    if config.resume is not None:
        raise ConfigError("bad-value", "A sweep resumes its trials by itself.", fix="remove resume")
    return values


def open_recipe_study(config: Config, section: SweepSection, name: str, ranks: int) -> Study:
    """The study of a recipe, new or continued. Errors in the search space are found before its folder is created."""
    space = parse_space(section.space)
    if section.sampler == "grid":
        grid_size(space)
    trials = RecipeTrials(recipe_values(config), LaunchSpec())
    folder = StudyFolder.of(name)
    if space and not folder.exists:
        trials.check(space, section.metric, ranks)
    return Study(folder, section, recipe_values(config))


def run_recipe_sweep(study: Study, spec: LaunchSpec, *, is_forkable: bool = True) -> int:
    """Run the trials that are left; returns the exit status. Not `is_forkable`: this process may have used torch, whose
    threads do not exist in a forked process, so trials use one thread per rank."""
    pool = open_pool(spec, study.section)
    preload()
    threads = _threads(pool) if is_forkable and pool.kind == "here" else 1
    return Sweep(study, pool, RecipeTrials(study.recipe, spec, threads)).run()


def _threads(pool: Pool) -> int:
    """Of each rank, if the cores are divided among all that run here at a time and the user decided nothing else."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // (pool.parallel * pool.ranks)))
