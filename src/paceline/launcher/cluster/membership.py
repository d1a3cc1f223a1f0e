"""The nodes of a job, as the meeting knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.diagnose.exits import RankExit
from paceline.launcher.cluster.channel import Channel


@dataclass(eq=False)
class NodeMember:
    """A node that was admitted."""

    channel: Channel
    node: int
    host: str
    ranks: int
    is_busy: bool = False  # it has been told to start and has not said that it ended
    pids: dict[str, str | None] = field(default_factory=dict)  # of its ranks, when they run, with their births
    ends: list[RankExit] = field(default_factory=list)
    oom_killed: list[int] = field(default_factory=list)
    suspects: dict[int, list[int]] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return bool(self.ends) and all(end.code == 0 for end in self.ends)

    def begin_anew(self) -> None:
        self.ends, self.oom_killed, self.suspects, self.pids, self.is_busy = [], [], {}, {}, False


@dataclass(frozen=True)
class OrphanedRanks:
    """Ranks that lost their launcher, and go on: their peers do not notice."""

    host: str
    pids: Mapping[str, str | None]
    words: str  # how the launcher was lost
    since: float
