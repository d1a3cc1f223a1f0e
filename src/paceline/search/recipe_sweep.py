"""A sweep over a recipe: checks the search before anything starts, then runs it."""

from __future__ import annotations

import os
import sys

from paceline.config.launch import LaunchSpec
from paceline.config.recipe import Config
from paceline.config.sections import SweepSection
from paceline.run.study_folder import StudyFolder
from paceline.search import recipe_trials
from paceline.search.placement import Pool, open_pool
from paceline.search.recipe_trials import RecipeTrials
from paceline.search.scheduler import Sweep
from paceline.search.space import grid_cells, parse_space
from paceline.search.study import Study

_THREADS = "OMP_NUM_THREADS"


def open_recipe_study(config: Config, section: SweepSection, name: str) -> Study:
    """The study of a recipe, new or continued. Errors in the search space are found before its folder is created."""
    space = parse_space(section.space)
    if section.sampler == "grid":
        grid_cells(space)
    trials = RecipeTrials(recipe_trials.recipe_values(config), LaunchSpec(), "the search space")
    folder = StudyFolder.of(name)
    if space and not folder.exists:
        trials.check(space, section.metric, config.launch.ranks or 1)
    return Study(folder, section, recipe_trials.recipe_values(config))


def run_recipe_sweep(study: Study, config: Config, spec: LaunchSpec) -> int:
    """Run the trials that are left; returns the exit status."""
    pool = open_pool(spec, study.section)
    if pool.kind == "here":
        _divide_cores(pool)
    recipe_trials.preload()
    trials = RecipeTrials(study.recipe, spec, "the search space")
    return Sweep(study, pool, trials).run()


def _divide_cores(pool: Pool) -> None:
    """Among all ranks that run here at a time, unless the user decided otherwise."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.setdefault(_THREADS, str(max(1, cores // (pool.parallel * pool.ranks))))
