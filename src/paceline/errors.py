"""Every failure has a name.

    PacelineError
    ├── ConfigError       the recipe, before anything started           config.*
    ├── LayoutError       how ranks share a model, and what it takes     layout.*
    ├── LaunchError       starting ranks, and ranks that ended          launch.*
    ├── WorldError        ranks that have to agree, and collectives     world.*
    ├── DataError         datasets, loaders, batches                    data.*
    ├── ModelError        names, options and losses of models           model.*
    ├── TrainError        the Trainer and its step                      train.*
    └── CheckpointError   what is read from and written to disk         checkpoint.*

An error carries a code (`config.unknown-key`), what was seen, why that is wrong, and what to do. Each code has a
page, shown by `paceline explain CODE`; a test holds codes and pages together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import ClassVar


class PacelineError(Exception):
    """Above every error that has a code. `str(error)` is the whole text that a person reads."""

    family: ClassVar[str] = "paceline"

    def __init__(self, name: str, what: str, *, why: str = "", fix: str = "") -> None:
        self.code = f"{self.family}.{name}"
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__(self.text())

    def text(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        """As plain values, for another rank or process."""
        family, name = self.code.split(".", 1)
        return {"family": family, "name": name, "what": self.what, "why": self.why, "fix": self.fix}

    @staticmethod
    def from_dict(values: Mapping[str, str]) -> PacelineError:
        """The error that another rank or process raised. Of a family that is not known here: a LaunchError."""
        kinds = {kind.family: kind for kind in PacelineError.__subclasses__()}
        kind = kinds.get(values["family"], LaunchError)
        return kind(values["name"], values["what"], why=values["why"], fix=values["fix"])


class ConfigError(PacelineError):
    family = "config"


class LayoutError(PacelineError):
    family = "layout"


class LaunchError(PacelineError):
    family = "launch"


class WorldError(PacelineError):
    family = "world"


class DataError(PacelineError):
    family = "data"


class ModelError(PacelineError):
    family = "model"


class TrainError(PacelineError):
    family = "train"


class CheckpointError(PacelineError):
    family = "checkpoint"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known word, or lists them all when none is near."""
    names = sorted(known)
    near = get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names[:12])}" + (f" and {len(names) - 12} others" if len(names) > 12 else "")
