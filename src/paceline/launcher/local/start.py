"""One start of the ranks of this node, and the environment variables of the launcher and of its ranks."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from paceline.config.launch import Endpoint, LaunchSpec
from paceline.diagnose.evidence import Hang, RankEvidence
from paceline.diagnose.patience import Standstill
from paceline.launcher.local.rank_logs import RankLogs
from paceline.runtime import environment


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


def prepare_environment(spec: LaunchSpec) -> None:
    """Call before torch is imported, which reads them."""
    os.environ.update(spec.env)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Divide the cores among the ranks unless the user decided otherwise; torchrun sets 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (spec.ranks or spec.default_cpu_ranks))))


def rank_environment(start: LocalStart, rendezvous: Endpoint, error_folder: str) -> list[dict[str, str]]:
    """The variables of each rank of this node: torchrun's, and ours."""
    node, spec, run_id = start.node, start.spec, uuid.uuid4().hex
    common = {
        environment.LAUNCHED: "1",
        **start.logs.environment,
        **start.env,
        "GROUP_RANK": str(node.number),
        "GROUP_WORLD_SIZE": str(node.nodes),
        "ROLE_NAME": "rank",
        "ROLE_WORLD_SIZE": str(node.world),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
        environment.RESTART_COUNT: str(start.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(max(spec.max_restarts, start.generation)),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if sys.platform == "linux" and (interface := node.interface or ("lo" if node.nodes == 1 else None)):
        # A value set by the user takes precedence.
        common |= {name: os.environ.get(name, value) for name, value in environment.interfaces(interface).items()}
    each = []
    for local, rank in enumerate(node.rank_range):
        own = environment.variables(environment.RankInfo(rank, node.world, local, node.ranks))
        # Where torch's @record, which many scripts use, writes an exception.
        error_file = f"{error_folder}/{local}.json"
        each.append({**common, **own, "ROLE_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error_file})
    return each
