"""Chooses the parameters of the next trial, with Optuna's samplers.

A sampler is created for each trial, with a seed derived from that of the study and the number of the trial. So the
parameters of trial n do not depend on how often the search was interrupted. With `random` and `grid` they depend on
nothing else; `tpe` and `cmaes` also see the results that are known at that time.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.config.sections import SweepSection
from paceline.errors import SearchError
from paceline.search.space import Parameter, grid_cell

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


def is_repeatable(sampler: str) -> bool:
    """Whether the parameters of a trial depend on its number only, and not on results of others."""
    return sampler in ("random", "grid")


def choose(
    section: SweepSection, space: Sequence[Parameter], number: int, minimizes: bool, known: Sequence[FrozenTrial]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The parameters of a trial as stored, and what the sampler wants to keep with it. `known`: all trials before."""
    import optuna

    if section.sampler == "grid":
        return grid_cell(space, number), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts of Optuna are marked as experimental
        direction = optuna.study.StudyDirection.MINIMIZE if minimizes else optuna.study.StudyDirection.MAXIMIZE
        view = optuna.create_study(direction=direction, sampler=_sampler(section, number))
        if not is_repeatable(section.sampler):
            view.add_trials(known)
        trial = view.ask({parameter.key: parameter.distribution for parameter in space})
        return dict(trial.params), dict(view.get_trials(deepcopy=False)[-1].system_attrs)


def _sampler(section: SweepSection, number: int) -> BaseSampler:
    from optuna.samplers import CmaEsSampler, RandomSampler, TPESampler

    digest = hashlib.sha256(f"{section.seed} {number}".encode()).digest()
    seed = int.from_bytes(digest[:4])
    if section.sampler == "tpe":
        return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
    if section.sampler == "cmaes":
        return CmaEsSampler(seed=seed)
    return RandomSampler(seed=seed)


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SearchError(
            "no-optuna", "A sweep needs Optuna, which is not installed.", fix="pip install 'paceline[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def quiet() -> Iterator[None]:
    """Parts of Optuna are marked as experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
