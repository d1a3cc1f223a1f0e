"""What the ranks of a launch run, and how they are started on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launcher.target import Target
from paceline.run.folder import RunFolder

GRACE = 30.0  # seconds that a SIGTERM leaves the ranks
ORPHANS = 60.0  # seconds that ranks may go on without their launcher where another one may come for them


def _no_imports() -> None:
    pass


def _nothing(world: int) -> None:
    pass


@dataclass(frozen=True)
class Workload:
    """A body for forked ranks; with a target, which can run in new interpreters as well."""

    body: Callable[[], None]
    preload: Callable[[], None] = _no_imports  # what all ranks would import: once, before they are forked
    prepare: Callable[[int], None] = _nothing  # done before ranks are forked, given their number
    target: Target | None = None
    recipe: Mapping[str, Any] | None = None  # of `paceline train`

    @property
    def script(self) -> Path | None:
        return Path(self.target.name) if self.target is not None and self.target.kind == "script" else None


@dataclass(frozen=True)
class LocalStart:
    """How to start the ranks of this machine, once."""

    ranks: int
    logs: RunFolder  # of the run, or a temporary one
    port: int | None = None  # of a single node's store
    grace: float = GRACE
    generation: int = 0  # how often the ranks were started before
    max_restarts: int = 0
    fresh: bool = False  # new interpreters
    node: int = 0
    nodes: int = 1
    first_rank: int = 0  # of this machine
    world: int | None = None  # ranks of all machines
    store: tuple[str, int] | None = None  # where that of several nodes is
    interface: str | None = None  # that reaches the other nodes
    orphans: float = 0.0  # seconds that ranks may go on without this launcher
    environment: Mapping[str, str] = field(default_factory=dict)  # of every rank
