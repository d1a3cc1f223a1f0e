"""What this node says about itself to the others: its address, its network interface, its versions and its GPUs."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from paceline.doctor.finding import Finding
from paceline.doctor.network_check import NodeFacts
from paceline.launcher.cluster.fingerprint import fingerprint
from paceline.runtime import environment
from paceline.runtime.network import LOOPBACK, interface_of

_GLOO_INTERFACE = next(iter(environment.interfaces("")))  # the name of the variable
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921  # Linux: get the IPv4 address and the MTU of an interface


def own_address() -> str:
    """Of the interface that the launcher or the user chose for the ranks, else the one that leads to the store."""
    if answer := _ask(os.environ.get(_GLOO_INTERFACE, ""), _SIOCGIFADDR):
        return socket.inet_ntoa(answer[20:24])
    return _address_to_store()


def users_environment() -> dict[str, str]:
    """The environment without the network interface that the launcher chose: the one that leads to the store."""
    own = environment.interfaces(_interface_of(_address_to_store()))
    return {name: value for name, value in os.environ.items() if own.get(name) != value}


def _address_to_store() -> str:
    host, port = environment.rendezvous_endpoint() or (LOOPBACK, 1)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    return (interface_of(address) if ":" not in address else None) or ""


def node_facts(address: str, port: int, device: str | int | None, findings: Sequence[Finding]) -> NodeFacts:
    """`findings`: of the checks of this machine. `device`: None if GPUs are used where there are any."""
    interface = _interface_of(address)
    answer = _ask(interface, _SIOCGIFMTU)
    return NodeFacts(
        host=socket.gethostname(),
        address=address,
        port=port,
        interface=interface,
        mtu=int.from_bytes(answer[16:20], "little") if answer else 0,
        versions=fingerprint(script=None, recipe=None)["version"],
        gpus=[] if device == "cpu" else _gpus(),
        findings=[finding.to_json() for finding in findings],
    )


def _ask(interface: str, what: int) -> bytes:
    """The kernel's answer about an interface; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, what, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return b""


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
