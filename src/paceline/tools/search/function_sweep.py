"""`paceline.sweep(fn, space)`: search with a function of one's own, or with a recipe, from Python.

def objective(trial):
    history = paceline.Trainer(build(trial["width"]), {"lr": trial["lr"]}, run=trial.run).train(data, val, epochs=3)
    return history.evaluations[-1]["loss"]

study = paceline.sweep(objective, {"lr": "log(1e-5, 1e-2)", "width": [64, 128, 256]}, trials=20, parallel=2)
study.best.params
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config.launch import LaunchSpec
from paceline.config.recipe import Config
from paceline.config.sections import SweepSection
from paceline.errors import LaunchError, SearchError
from paceline.launcher.function import launch
from paceline.launcher.local import agent
from paceline.launcher.workload import reject_launch_on_rank
from paceline.run import study_folder as study_files
from paceline.run.folder import RunFolder
from paceline.run.ledger import Ledger
from paceline.run.study_folder import StudyFolder
from paceline.tools.search import recipe_trials
from paceline.tools.search.placement import TrialSlot, open_pool
from paceline.tools.search.scheduler import Sweep
from paceline.tools.search.study import Study, read_section
from paceline.tools.search.trial import Trial


class TrialContext(Mapping[str, Any]):
    """What the function of a sweep gets: the parameters of its trial, by key."""

    def __init__(self, trial: Trial, folder: RunFolder, metric: str) -> None:
        self.number, self.params = trial.number, dict(trial.params)
        self.run = str(folder.path / "run")  # a folder for `Trainer(run=…)`
        self._folder, self._metric = folder, metric

    def report(self, step: int, value: float) -> None:
        """Report a value on the way, for the learning curve and for `pruner: median`. Call on rank 0."""
        study_files.append_evaluation(self._folder, step, self._metric, float(value))

    def __getitem__(self, key: str) -> Any:
        return self.params[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)


class _FunctionTrials:
    """Calls the function on the ranks of each trial; rank 0 returns the value."""

    def __init__(self, function: Callable[[TrialContext], float | None], metric: str) -> None:
        self._function, self._metric = function, metric

    def body(self, trial: Trial, folder: RunFolder, slot: TrialSlot, fraction: float | None) -> int:
        context = TrialContext(trial, folder, self._metric)
        ranks = sum(len(indices) for _, indices in slot.taken)
        os.environ.update(slot.options(LaunchSpec()).env)  # its GPUs
        try:
            value = launch(lambda: self._function(context), ranks=ranks)
        except LaunchError as error:
            if killed := re.search(r"was killed by (SIG[A-Z]+)", error.what):  # an accident
                return 128 + signal.Signals[killed[1]]
            raise
        if value is not None:
            known = study_files.values(folder, self._metric)
            study_files.append_evaluation(folder, known[-1][0] + 1 if known else 0, self._metric, float(value))
        Ledger(folder).note("ended", status=0)
        return 0


def sweep(
    target: Callable[[TrialContext], float | None] | Config | Mapping[str, Any] | str | Path,
    space: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    ranks: int = 1,
    hosts: str | None = None,
    ray: str | None = None,
    **settings: Any,
) -> Study:
    """Search for good settings with many trials. The same call continues a search that was interrupted.

    Args:
        target: a function of a `TrialContext` that returns the value of the metric, or a recipe: a `Config`, a dict or
            the path of a file.
        space: how each parameter varies: `"log(1e-5, 1e-2)"`, `"uniform(0, 0.5)"`, `"int(64, 512, 64)"`,
            `"logint(16, 1024)"`, or a list of choices. Keys are those of the recipe; for a function, any names.
        name: name or path of the study; by default that of the function or the recipe.
        ranks: number of ranks of each trial.
        hosts: hosts for the trials of a recipe, as in `paceline sweep --hosts`.
        ray: address of a Ray cluster for the trials of a recipe.
        settings: keys of a recipe's `sweep:` section, such as `trials=50`, `parallel=4`, `pruner="asha"`.

    Returns:
        The study: `study.best.params`, `study.best.value`, `study.trials()`.

    Raises:
        SearchError: `search.bad-space`, `search.no-space`, `search.no-metric`, `search.other-study`,
            `search.needs-recipe`: the search space, the metric or the study does not fit; `search.all-failed`
        LaunchError: `launch.inside-a-rank`: the script was launched on several ranks

    Example:
        >>> import paceline
        >>> def objective(trial):
        ...     return (trial.params["x"] - 0.5) ** 2
        >>> study = paceline.sweep(objective, {"x": "uniform(0, 1)"}, trials=2)
        >>> len(study.trials())
        2
    """
    reject_launch_on_rank("paceline.sweep()")
    agent.require_forkable()
    if callable(target):
        return _sweep_function(target, read_section(space or {}, settings), name, ranks)
    config = _read_config(target)
    merged = read_section({**config.sweep.space, **(space or {})}, {**config.sweep.model_dump(), **settings})
    stem = Path(target).stem if isinstance(target, (str, Path)) else "recipe"
    study = recipe_trials.open_recipe_study(config, merged, name or f"{stem}-sweep", ranks)
    spec = LaunchSpec.resolve(config, {"ranks": ranks, "hosts": hosts, "ray": ray})
    _require_finished(recipe_trials.run_recipe_sweep(study, spec, is_forkable=False))
    return study


def _sweep_function(
    function: Callable[[TrialContext], float | None], section: SweepSection, name: str | None, ranks: int
) -> Study:
    if section.pruner == "asha":
        raise SearchError("needs-recipe", "pruner: asha needs a recipe, not a function.")
    study = Study(StudyFolder.of(name or f"{getattr(function, '__name__', 'function')}-sweep"), section, {})
    here = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    pool = open_pool(LaunchSpec(ranks=ranks), section, here)  # functions run on this machine only
    recipe_trials.preload()
    _require_finished(Sweep(study, pool, _FunctionTrials(function, section.metric)).run())
    return study


def _read_config(target: Config | Mapping[str, Any] | str | Path) -> Config:
    if isinstance(target, Config):
        return target
    return Config.from_dict(target) if isinstance(target, Mapping) else Config.from_file(target)


def _require_finished(status: int) -> None:
    if status:
        raise KeyboardInterrupt if status == 130 else SystemExit(status)
