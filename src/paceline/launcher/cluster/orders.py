"""What a front end tells the launcher that it starts on another machine: one line of JSON on its standard input."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.config.launch import Endpoint, LaunchSpec
from paceline.launcher.workload import Target

_LARGEST = 16 << 20


@dataclass(frozen=True)
class NodeOrder:
    node: int
    token: str
    coordinator: tuple[Endpoint, ...]  # addresses at which the front end may be reached
    port: int  # of the coordinator
    spec: LaunchSpec
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
    values = json.loads(line)
    return NodeOrder(
        node=values["node"],
        token=values["token"],
        coordinator=tuple(Endpoint(*address) for address in values["coordinator"]),
        port=values["port"],
        spec=LaunchSpec.from_json(values["spec"]),
        target=None if values["target"] is None else Target.from_json(values["target"]),
        recipe=values["recipe"],
        folder=values["folder"],
        by_ssh=values["by_ssh"],
    )


def reachable(order: NodeOrder) -> list[Endpoint]:
    """Where to look for the front end. Whom it started by ssh or srun has been told where it came from."""
    addresses = list(order.coordinator)
    came_from = os.environ.get("SSH_CONNECTION", "").split()
    if order.by_ssh and came_from:
        addresses.insert(0, Endpoint(came_from[0], order.port))
    if launch_node := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        addresses.append(Endpoint(launch_node, order.port))
    return list(dict.fromkeys(addresses))
