"""One start of the ranks of this node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from paceline.config.launch import Endpoint, LaunchSpec
from paceline.diagnose.evidence import Hang, RankEvidence
from paceline.diagnose.patience import Standstill
from paceline.launcher.local.rank_logs import RankLogs


class NodeAssignment(NamedTuple):
    """Which ranks this node runs, and how they reach the others."""

    ranks: int  # on this node
    world: int  # ranks on all nodes
    number: int = 0  # of this node
    nodes: int = 1
    first_rank: int = 0  # of this node
    store: Endpoint | None = None  # of several nodes; a single one opens its own
    interface: str | None = None  # network interface to the other nodes
    orphan_seconds: float = 0.0  # that ranks may continue without this launcher

    @property
    def rank_range(self) -> range:
        return range(self.first_rank, self.first_rank + self.ranks)


class LocalStart(NamedTuple):
    """One start of the ranks of this node."""

    spec: LaunchSpec
    logs: RankLogs
    node: NodeAssignment
    generation: int = 0  # number of earlier starts
    env: Mapping[str, str] = {}  # additional variables of every rank


class AgentObserver:
    """Connects the agent to whoever decides about its ranks; this one to nobody."""

    hang: Hang | None = None  # for which the ranks of this node are being stopped
    others_ended = False  # ranks of other nodes have, or one of theirs is unable to exit

    def started(self, pids: Collection[int]) -> None:
        """The ranks are running."""

    def failing(self) -> None:
        """A rank of this node failed; the others get a moment to exit."""

    def interrupted(self, number: int) -> None:
        """This launcher received a signal that ends the run; SIGKILL: a second Ctrl-C."""

    def standstill(self, found: Standstill, ranks: Sequence[RankEvidence]) -> None:
        """The ranks make no progress. Called again if that lasts."""

    def continued(self, seconds: float) -> None:
        """They make progress again, after so long."""

    def wants_evidence(self) -> bool:
        """Whether to call `evidence` with what is known of the ranks now."""
        return False

    def evidence(self, ranks: Sequence[RankEvidence], still: float, limit: float) -> None:
        """`still`: for how long none of them has made progress; `limit`: how long they may."""

    def order(self) -> int | None:
        """A signal to send to the ranks; 0 if ranks of another node failed; None to continue."""
        return None
