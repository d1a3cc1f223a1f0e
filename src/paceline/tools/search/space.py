"""The search space: which keys of a recipe vary, and how; and the choice of the next trial, with Optuna's samplers.

optimizer.lr=log(1e-5, 1e-2)         a float, on a logarithmic scale
model.dropout=uniform(0, 0.5)        a float; uniform(0, 0.5, 0.1) in steps
model.width=int(64, 512, 64)         an integer, here in steps of 64
batch=logint(16, 1024)               an integer, on a logarithmic scale
batch=choice(32, 64, 128)            one of these values, of any type

A sampler is created for each trial, with a seed derived from that of the study and the number of the trial. So the
parameters of trial n do not depend on how often the search was interrupted. With `random` and `grid` they depend on
nothing else; `tpe` and `cmaes` also see the results that are known at that time.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.config import files
from paceline.config.sections import SHORTHANDS, SweepSection
from paceline.errors import ConfigError, SearchError, did_you_mean

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

_CALL = re.compile(r"\s*(?P<kind>[A-Za-z_]\w*)\s*\((?P<values>.*)\)\s*", re.DOTALL)
_KINDS = {
    "log": "log(1e-5, 1e-2)",
    "uniform": "uniform(0, 0.5)",
    "int": "int(64, 512, 64)",
    "logint": "logint(16, 1024)",
    "choice": "choice(32, 64, 128)",
}
_FIX = f"write one of {', '.join(_KINDS.values())}"


@dataclass(frozen=True)
class Parameter:
    """A key of a recipe that varies."""

    key: str
    kind: str
    values: tuple[Any, ...]  # low, high and perhaps a step; or the choices

    @classmethod
    def parse(cls, key: str, text: Any) -> Parameter:
        """From `log(1e-5, 1e-2)`, or from a list of choices."""
        if isinstance(text, (list, tuple)):
            return cls(key, "choice", tuple(text)).checked()
        found = _CALL.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise _bad(key, f"{text!r} is not a set of values", fix=_FIX)
        if found["kind"] not in _KINDS:
            raise _bad(key, f"unknown function {found['kind']!r}", fix=did_you_mean(found["kind"], _KINDS))
        return cls(key, found["kind"], tuple(_parsed(key, found["values"]))).checked()

    def checked(self) -> Parameter:
        values, expected = self.values, f"expected {_KINDS[self.kind]}"
        if self.kind == "choice":
            if not values:
                raise _bad(self.key, "choice() has no values", fix=f"{expected}")
            try:
                stored = {json.dumps(value) for value in values}
            except (TypeError, ValueError):
                raise _bad(self.key, "a value can't be stored in a recipe", fix="list numbers, text or lists") from None
            if len(stored) < len(values):
                raise _bad(self.key, "a value is listed twice", fix="list each value once")
            return self
        most = 2 if self.kind in ("log", "logint") else 3
        kinds = (int,) if self.kind in ("int", "logint") else (int, float)
        if not 2 <= len(values) <= most or not all(type(each) in kinds and math.isfinite(each) for each in values):
            raise _bad(self.key, f"{self} does not fit", fix=expected)
        if not values[0] < values[1]:
            raise _bad(self.key, f"in {self}, the lower bound is not below the upper bound", fix=expected)
        if self.kind in ("log", "logint") and values[0] <= 0:
            raise _bad(self.key, f"{self} starts at {values[0]}, which has no logarithm", fix="start above 0")
        if len(values) == 3 and not 0 < values[2] <= values[1] - values[0]:
            raise _bad(self.key, f"the step of {self} is not between 0 and the width of the range", fix=expected)
        return self

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(json.dumps(value) for value in self.values)})"

    @property
    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.kind == "choice":
            return CategoricalDistribution([json.dumps(value) for value in self.values])  # True, 1 and 1.0 are equal
        low, high, *step = self.values
        if self.kind in ("int", "logint"):
            return IntDistribution(low, high, log=self.kind == "logint", step=step[0] if step else 1)
        return FloatDistribution(float(low), float(high), log=self.kind == "log", step=float(step[0]) if step else None)

    def decode(self, stored: Any) -> Any:
        """The value for the recipe."""
        if self.kind == "choice":
            return next(value for value in self.values if json.dumps(value) == stored)
        return stored

    @property
    def grid(self) -> Sequence[Any] | None:
        """All values as stored; None if there are infinitely many."""
        if self.kind == "choice":
            return [json.dumps(value) for value in self.values]
        low, high, *step = self.values
        if self.kind in ("int", "logint"):
            return range(low, high + 1, step[0] if step else 1)
        if not step:
            return None
        return [low + number * step[0] for number in range(math.floor((high - low) / step[0] + 1e-9) + 1)]

    @property
    def extremes(self) -> Sequence[Any]:
        """Values that show whether all are valid."""
        return self.values if self.kind == "choice" else self.values[:2]


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Plain overrides, and those that are part of the search space."""
    plain, space = [], {}
    for override in overrides:
        key, _, value = override.partition("=")
        if _CALL.fullmatch(value):
            space[key.strip()] = value
        else:
            plain.append(override)
    return plain, space


def parse_space(space: Mapping[str, Any]) -> list[Parameter]:
    """The parameters, in the order in which they were given."""
    for key in space:
        inner = next((other for other in space if other.startswith(f"{key}.")), None)
        if inner is not None:
            raise _bad(key, f"{inner} is a part of it", fix=f"use {key}.name, or remove one of them")
    return [Parameter.parse(key, value) for key, value in space.items()]


def set_key(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a dotted key of a recipe, in new sections: other trials share the old ones. `optimizer=sgd` keeps the other
    keys of the section."""
    first, *rest = path
    before = values.get(first)
    section = dict(before) if isinstance(before, Mapping) else {}
    if rest:
        if before is not None and not isinstance(before, Mapping):
            section = {SHORTHANDS.get(first, "name"): before}
        set_key(section, rest, value)
        value = section
    elif section and first in SHORTHANDS and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        value = {**section, SHORTHANDS[first]: value}
    values[first] = value


def grid_size(space: Sequence[Parameter]) -> int:
    return math.prod(map(len, _columns(space)))


def grid_cell(space: Sequence[Parameter], number: int) -> dict[str, Any]:
    """A combination, as stored; the last parameter varies first."""
    cell = {}
    for parameter, column in zip(reversed(space), reversed(_columns(space)), strict=True):
        number, index = divmod(number, len(column))
        cell[parameter.key] = column[index]
    return {parameter.key: cell[parameter.key] for parameter in space}


def _columns(space: Sequence[Parameter]) -> list[Sequence[Any]]:
    columns = []
    for parameter in space:
        grid = parameter.grid
        if grid is None:
            raise _bad(
                parameter.key,
                f"a grid needs a list of values, not {parameter}",
                fix="use choice(...) or uniform(low, high, step), or another sampler",
            )
        columns.append(grid)
    return columns


def _parsed(key: str, text: str) -> list[Any]:
    try:
        return list(files.parse_value(f"[{text}]", key))
    except ConfigError as error:
        raise _bad(key, error.what.rstrip("."), fix=_FIX) from None


def _bad(key: str, problem: str, *, fix: str) -> SearchError:
    return SearchError("bad-space", f"Invalid search space: {key}: {problem}.", fix=fix)


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
    with quiet():
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
        raise SearchError("no-optuna", "A sweep needs Optuna, which is not installed.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def quiet() -> Iterator[None]:
    """Parts of Optuna are marked as experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
