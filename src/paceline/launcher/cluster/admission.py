"""Which nodes may take part in a job, and as which number."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.errors import LaunchError
from paceline.launcher.cluster.channel import Message
from paceline.launcher.cluster.fingerprint import Identity, differences

_SHOWN = 5


@dataclass(frozen=True)
class JoinRequest:
    """How a node introduces itself."""

    host: str
    ranks: int
    nodes: tuple[int, int]
    node: int | None  # None: any number
    identity: Identity

    @classmethod
    def read(cls, message: Message) -> JoinRequest:
        fewest, most = message["nodes"]
        node = message["node"]
        return cls(
            host=str(message["host"]),
            ranks=int(message["ranks"]),
            nodes=(int(fewest), int(most)),
            node=None if node is None else int(node),
            identity=message["identity"],
        )

    def tell(self) -> Message:
        return {"kind": "hello", **vars(self)}


def place(hello: JoinRequest, fewest: int, most: int, free: Collection[int], first: Identity | None) -> int:
    """The number of a new node; refuses what does not fit, by name."""
    found = [] if first is None else differences(first, hello.identity)
    if hello.nodes != (fewest, most):
        found.insert(0, f"nodes: {_nodes(fewest, most)} and {_nodes(*hello.nodes)}")
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise LaunchError(
            "node-differs",
            f"{hello.host} does not run the same as the first node: {'; '.join(found[:_SHOWN])}{more}.",
            why="nodes that differ train different models, or wait for each other for ever",
            fix="make them the same: the command, the files beside the script, the installed versions",
        )
    if not free:
        raise LaunchError(
            "job-is-full",
            f"All {most} nodes of this job are there already, so {hello.host} has no place in it.",
            fix="give another port in --master for another job, or a larger number in --nodes for this one",
        )
    if hello.node is None:
        return min(free)
    if not 0 <= hello.node < most:
        raise LaunchError(
            "bad-number",
            f"--node-rank {hello.node} is not one of {most} nodes.",
            fix=f"they count from 0 to {most - 1}",
        )
    if hello.node not in free:
        raise LaunchError(
            "node-rank-taken",
            f"Another launcher is node {hello.node} of this job already, so {hello.host} can't be it.",
            fix=f"free numbers: {', '.join(map(str, sorted(free)))}; or leave --node-rank out, and one is given",
        )
    return hello.node


def nodes_missing(missing: Collection[int], seconds: float) -> LaunchError:
    return LaunchError(
        "nodes-missing",
        f"{'Node' if len(missing) == 1 else 'Nodes'} {', '.join(map(str, missing))} did not come within {seconds:g} s.",
        why="their launchers were not started, have ended, or can't reach this machine",
        fix="start them with the same command and their own --node-rank; look at the firewall; --wait sets the time",
    )


def _nodes(fewest: int, most: int) -> str:
    return str(most) if fewest == most else f"{fewest}:{most}"
