"""What a front end tells the launcher that it starts on another machine: one line of JSON on its standard input."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.launcher.launch import Launch
from paceline.launcher.target import Target

_LARGEST = 16 << 20


@dataclass(frozen=True)
class NodeOrder:
    node: int
    token: str
    meeting: tuple[tuple[str, int], ...]  # addresses at which the front end may be reached
    port: int  # of the meeting
    launch: Launch
    target: Target | None
    recipe: Mapping[str, Any] | None
    folder: str  # in which the ranks work
    by_ssh: bool = False

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def read(descriptor: int) -> NodeOrder:
    """Reads no more than the line: what comes after it is listened to by somebody else."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte or len(line) > _LARGEST:
            raise SystemExit("paceline node: no order came; this is started by `paceline launch`, not by people")
        line += byte
    told = json.loads(line)
    launch = dict(told["launch"])
    launch["nodes"], launch["tee"] = tuple(launch["nodes"]), tuple(launch["tee"])
    return NodeOrder(
        node=told["node"],
        token=told["token"],
        meeting=tuple((host, port) for host, port in told["meeting"]),
        port=told["port"],
        launch=Launch(**launch),
        target=None if told["target"] is None else Target.from_json(told["target"]),
        recipe=told["recipe"],
        folder=told["folder"],
        by_ssh=told["by_ssh"],
    )


def reachable(order: NodeOrder) -> list[tuple[str, int]]:
    """Where to look for the front end. Whom it started by ssh or srun has been told where it came from."""
    addresses = list(order.meeting)
    came_from = os.environ.get("SSH_CONNECTION", "").split()
    if order.by_ssh and came_from:
        addresses.insert(0, (came_from[0], order.port))
    if told := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        addresses.append((told, order.port))
    return list(dict.fromkeys(addresses))
