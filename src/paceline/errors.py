"""All errors of paceline.

    PacelineError
    ├── ConfigError       invalid recipes                               config.*
    ├── LayoutError       layouts that do not fit the model or ranks    layout.*
    ├── LaunchError       starting ranks, and failed ranks              launch.*
    ├── WorldError        process groups and collectives                world.*
    ├── DataError         datasets, loaders, batches                    data.*
    ├── ModelError        names, options and losses of models           model.*
    ├── TrainError        the Trainer and its step                      train.*
    ├── CheckpointError   checkpoints and run folders                   checkpoint.*
    └── SearchError       search spaces and studies                     search.*

An error has a code (`config.unknown-key`), a message, a reason and a fix. `paceline explain CODE` shows the page of
each code in the catalogue (diagnose/catalog.md).

Example:
    >>> import paceline
    >>> try:
    ...     paceline.Config.from_dict({"bach": 32})
    ... except paceline.errors.PacelineError as error:
    ...     print(error.code)
    config.unknown-key
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import ClassVar


@cache
def advice() -> dict[str, dict[str, dict[str, str]]]:
    """Why errors occur and what to do, by family and name. Ranks read it when they start: a process that has run out
    of files has an error to tell as well."""
    return tomllib.loads(Path(__file__).with_name("errors.toml").read_text(encoding="utf-8"))


def _usual(family: str, name: str) -> dict[str, str]:
    try:
        return advice().get(family, {}).get(name, {})
    except OSError:
        return {}


class PacelineError(Exception):
    """Base class of all errors with a code. `str(error)` is the complete text shown to users.

    Args:
        name: the code without its family: `unknown-key`
        what: what happened
        why: the reason; default: that of the code in `errors.toml`
        fix: what to do; likewise

    Attributes:
        code: family and name: `config.unknown-key`

    Example:
        >>> error = paceline.errors.ConfigError("unknown-key", "unknown key 'bach'", fix="did you mean 'batch'?")
        >>> print(error)
        [config.unknown-key] unknown key 'bach'
          fix: did you mean 'batch'?
    """

    family: ClassVar[str] = "paceline"

    def __init__(self, name: str, what: str, *, why: str | None = None, fix: str | None = None) -> None:
        usual = _usual(self.family, name)
        self.code = f"{self.family}.{name}"
        self.what = what
        self.why = usual.get("why", "") if why is None else why
        self.fix = usual.get("fix", "") if fix is None else fix
        super().__init__(self.text())

    def text(self) -> str:
        """The complete text, as `str(error)`.

        Returns:
            Code and message, then why and fix, each on a line of its own.

        Example:
            >>> error.text() == str(error)
            True
        """
        lines = [f"[{self.code}] {self.what}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        """Plain values, to send to another rank or process.

        Returns:
            The parts of the error.

        Example:
            >>> error.to_dict()["name"]
            'unknown-key'
        """
        family, name = self.code.split(".", 1)
        return {"family": family, "name": name, "what": self.what, "why": self.why, "fix": self.fix}

    @staticmethod
    def from_dict(values: Mapping[str, str]) -> PacelineError:
        """The error that another rank or process raised. An unknown family becomes a LaunchError.

        Args:
            values: what `to_dict()` returned

        Returns:
            An equal error.

        Example:
            >>> paceline.errors.PacelineError.from_dict(error.to_dict()).code
            'config.unknown-key'
        """
        kinds = {kind.family: kind for kind in PacelineError.__subclasses__()}
        kind = kinds.get(values["family"], LaunchError)
        return kind(values["name"], values["what"], why=values["why"], fix=values["fix"])


class ConfigError(PacelineError):
    """Invalid recipe or setting."""

    family = "config"


class LayoutError(PacelineError):
    """The layout does not fit the model or the ranks."""

    family = "layout"


class LaunchError(PacelineError):
    """Ranks could not be started, or failed."""

    family = "launch"


class WorldError(PacelineError):
    """Error of a process group or a collective."""

    family = "world"


class DataError(PacelineError):
    """Unusable dataset, loader or batch."""

    family = "data"


class ModelError(PacelineError):
    """Unknown model, invalid option or unusable output of a model."""

    family = "model"


class TrainError(PacelineError):
    """Error of the Trainer or of a training step."""

    family = "train"


class CheckpointError(PacelineError):
    """Error of a checkpoint or a run folder."""

    family = "checkpoint"


class SearchError(PacelineError):
    """Invalid search space, or error of a study."""

    family = "search"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word, or list the known words if none is close."""
    names = sorted(known)
    near = get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names[:12])}" + (f" and {len(names) - 12} others" if len(names) > 12 else "")
