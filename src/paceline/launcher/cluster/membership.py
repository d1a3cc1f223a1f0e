"""Which nodes a job consists of: join requests, the nodes that were admitted, and ranks orphaned by their launcher."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.config.launch import NodeRange
from paceline.diagnose.exits import RankExit
from paceline.errors import LaunchError
from paceline.launcher.cluster.channel import Channel, Message
from paceline.launcher.cluster.fingerprint import Fingerprint, differences
from paceline.runtime.network import LOOPBACK, is_loopback

_MAX_SHOWN = 5
_MAX_RANKS = 1 << 16  # of a node


@dataclass(frozen=True)
class JoinRequest:
    """The first message of a node."""

    host: str
    ranks: int
    nodes: NodeRange
    node: int | None  # None: any
    fingerprint: Fingerprint

    @classmethod
    def from_message(cls, message: Message) -> JoinRequest:
        from pydantic import TypeAdapter

        request = TypeAdapter(cls).validate_python(message)
        if not 0 < request.ranks <= _MAX_RANKS:
            raise ValueError(f"{request.ranks} ranks")
        return replace(request, host=request.host[:255])

    def to_message(self) -> Message:
        return {"kind": "join", **vars(self)}


@dataclass(eq=False)
class NodeMember:
    """A node that was admitted."""

    channel: Channel
    node: int
    host: str
    ranks: int
    first_rank: int = 0  # of its ranks, in this generation
    is_busy: bool = False  # told to start its ranks, and has not reported their exits
    pids: dict[str, str | None] = field(default_factory=dict)  # of its running ranks, each with its start time
    exits: list[RankExit] = field(default_factory=list)
    oom_killed: list[int] = field(default_factory=list)
    suspects: dict[int, list[int]] = field(default_factory=dict)

    @property
    def rank_range(self) -> range:
        return range(self.first_rank, self.first_rank + self.ranks)

    @property
    def succeeded(self) -> bool:
        return bool(self.exits) and all(each.code == 0 for each in self.exits)

    @property
    def has_cause(self) -> bool:
        """Whether one of its ranks failed. Ranks that a lost launcher stops may stop the others with SIGTERM."""
        return any(each.code not in (None, 0, -signal.SIGTERM, 128 + signal.SIGTERM) for each in self.exits)

    def record_start(self, message: Message) -> None:
        """The processes of its ranks."""
        pids = message["pids"].items()
        self.pids = {str(int(pid)): None if born is None else str(born) for pid, born in pids}

    def record_exits(self, message: Message) -> None:
        """The exits of its ranks, as the node reports them. Nothing is recorded of an invalid report."""
        offset = time.time() - float(message["now"])  # of its clock to ours
        exits = [RankExit.from_json(each, node=self.node, clock_offset=offset) for each in message["exits"]]
        oom_killed = [int(rank) for rank in message["oom_killed"]]
        suspects = {int(rank): [int(each) for each in samples] for rank, samples in message["suspects"].items()}
        if len(exits) != self.ranks:
            raise ValueError(f"exits of {len(exits)} ranks out of {self.ranks}")
        self.exits, self.oom_killed, self.suspects, self.is_busy = exits, oom_killed, suspects, False

    def reset(self) -> None:
        """Forget the previous generation."""
        self.exits, self.oom_killed, self.suspects, self.pids, self.is_busy = [], [], {}, {}, False


@dataclass(frozen=True)
class OrphanedRanks:
    """Ranks whose launcher was lost and that keep running: the other ranks do not notice."""

    host: str
    pids: Mapping[str, str | None]
    reason: str  # why the launcher was lost
    since: float


def assign_node(request: JoinRequest, nodes: NodeRange, free: Collection[int], first: Fingerprint | None) -> int:
    """The number of a new node. Rejects a node that differs from the first, or for which no number is free."""
    found = [] if first is None else differences(first, request.fingerprint)
    if request.nodes != nodes:
        found.insert(0, f"nodes: {nodes} and {request.nodes}")
    if found:
        more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        raise LaunchError(
            "node-differs", f"{request.host} differs from the first node: {'; '.join(found[:_MAX_SHOWN])}{more}."
        )
    if not free:
        raise LaunchError("job-is-full", f"The job already has all {nodes.most} nodes; {request.host} was rejected.")
    if request.node is None:
        return min(free)
    if not 0 <= request.node < nodes.most:
        raise LaunchError(
            "bad-number",
            f"Invalid value for --node-rank: {request.node}. The job has {nodes.most} nodes.",
            fix=f"use a number from 0 to {nodes.most - 1}",
        )
    if request.node not in free:
        raise LaunchError(
            "node-rank-taken",
            f"Node {request.node} has already joined; {request.host} was rejected.",
            fix=f"free numbers: {', '.join(map(str, sorted(free)))}; or omit --node-rank to get one assigned",
        )
    return request.node


def nodes_missing(missing: Collection[int], seconds: float) -> LaunchError:
    return LaunchError(
        "nodes-missing",
        f"{'Node' if len(missing) == 1 else 'Nodes'} {', '.join(map(str, missing))} did not join within {seconds:g} s.",
    )


def place_ranks(members: Sequence[NodeMember]) -> list[Message]:
    """For each member, which nodes and ranks of the world are its own."""
    world = sum(member.ranks for member in members)
    own = _own_addresses(members)
    places, first = [], 0
    for index, member in enumerate(members):
        # For a node that is here too, the address at which all nodes reach this machine.
        address = (own or [LOOPBACK])[0] if _is_here(member) else None
        places.append(
            {"node": index, "nodes": len(members), "ranks": member.ranks, "first_rank": first, "world": world,
             "address": address}
        )  # fmt: skip
        first += member.ranks
    return places


def store_address(members: Sequence[NodeMember], listening: str) -> str:
    """Where to open the store of the ranks, which authenticates nobody, if the coordinator listens at `listening`."""
    own = set(_own_addresses(members))
    if not own:
        return LOOPBACK
    return own.pop() if len(own) == 1 else listening


def _own_addresses(members: Sequence[NodeMember]) -> list[str]:
    """Addresses of this machine at which nodes on other machines reached it."""
    return [member.channel.own_address for member in members if not _is_here(member)]


def _is_here(member: NodeMember) -> bool:
    """Whether a node is on the machine of the coordinator."""
    peer = member.channel.peer_address
    return is_loopback(peer) or peer == member.channel.own_address


def pids_on(host: str, orphans: Iterable[OrphanedRanks]) -> dict[str, str | None]:
    """Orphaned ranks on that machine, each with its start time."""
    found = [each.pids for each in orphans if each.host == host]
    return {pid: started for pids in found for pid, started in pids.items()}
