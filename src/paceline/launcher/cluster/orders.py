"""The order that the front end sends to a launcher on another node: one line of JSON on standard input."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.config.launch import Endpoint, LaunchSpec
from paceline.launcher.workload import Target

_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class NodeOrder:
    node: int
    token: str
    coordinator: tuple[Endpoint, ...]  # addresses of the front end
    port: int  # of the coordinator
    spec: LaunchSpec
    target: Target | None
    recipe: Mapping[str, Any] | None
    folder: str  # working directory of the ranks
    by_ssh: bool = False  # whether the ssh connection, if any, came from the front end

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def read(descriptor: int) -> NodeOrder:
    """Read one line, and nothing after it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte or len(line) > _MAX_BYTES:
            raise SystemExit("paceline node: no order received; this command is started by `paceline launch`")
        line += byte
    values = json.loads(line)
    values["coordinator"] = tuple(Endpoint(*address) for address in values["coordinator"])
    values["spec"] = LaunchSpec.from_json(values["spec"])
    values["target"] = values["target"] and Target.from_json(values["target"])
    return NodeOrder(**values)


def reachable(order: NodeOrder) -> list[Endpoint]:
    """Addresses at which to try the front end, including those from which ssh or srun connected."""
    addresses = list(order.coordinator)
    ssh_client = os.environ.get("SSH_CONNECTION", "").split()
    if order.by_ssh and ssh_client:
        addresses.insert(0, Endpoint(ssh_client[0], order.port))
    if launch_node := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        addresses.append(Endpoint(launch_node, order.port))
    return list(dict.fromkeys(addresses))
