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
from paceline.search.space import grid_size, parse_space
from paceline.search.study import Study


def open_recipe_study(config: Config, section: SweepSection, name: str, ranks: int) -> Study:
    """The study of a recipe, new or continued. Errors in the search space are found before its folder is created."""
    space = parse_space(section.space)
    if section.sampler == "grid":
        grid_size(space)
    trials = RecipeTrials(recipe_trials.recipe_values(config), LaunchSpec())
    folder = StudyFolder.of(name)
    if space and not folder.exists:
        trials.check(space, section.metric, ranks)
    return Study(folder, section, recipe_trials.recipe_values(config))


def run_recipe_sweep(study: Study, spec: LaunchSpec, *, is_forkable: bool = True) -> int:
    """Run the trials that are left; returns the exit status. Not `is_forkable`: this process may have used torch, whose
    threads do not exist in a forked process, so trials use one thread per rank."""
    pool = open_pool(spec, study.section)
    recipe_trials.preload()
    threads = _threads(pool) if is_forkable and pool.kind == "here" else 1
    return Sweep(study, pool, RecipeTrials(study.recipe, spec, threads)).run()


def _threads(pool: Pool) -> int:
    """Of each rank, if the cores are divided among all that run here at a time and the user decided nothing else."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // (pool.parallel * pool.ranks)))
