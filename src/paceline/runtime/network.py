"""Listening sockets, the addresses of this machine, and the interface that leads to a host."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket, at `port` or a free one."""
    if port is not None and not 0 < port < 65536:
        raise LaunchError("bad-number", f"Invalid port: {port}.", fix="use a port from 1 to 65535, or omit it")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port or 0))
        listener.listen(1024)  # a flood of connections must not keep out those of nodes and ranks
    except OSError as error:
        listener.close()
        where = f"Port {port}" if port else f"A port on {'loopback' if host == LOOPBACK else host}"
        raise LaunchError(
            "port-in-use",
            f"{where} cannot be opened: {error.strerror}.",
            why="it is in use, or requires elevated permissions",
            fix="choose another port, or omit it to use a free one",
        ) from None
    return listener


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def require_known(host: str) -> None:
    """Raise if a name does not resolve. In Kubernetes it may later, and a name server that is late is waited for."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or a long label
        if error.args[0] != socket.EAI_AGAIN and "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise LaunchError(
                "unknown-host", f"The name {host} of --master does not resolve: {error.args[-1]}."
            ) from None


def own_addresses_of(host: str) -> list[str]:
    """The addresses of a host name that belong to this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    own = []
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.bind((address[0], 0))
            own.append(str(address[0]))
    return list(dict.fromkeys(own))


_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU = 0x8913, 0x8915, 0x8921  # of Linux
_RUNNING = 0x40  # flag of an interface: up, and a cable is connected


def _ask(interface: str, request: int) -> bytes:
    """A property of an interface; zeros if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        return fcntl.ioctl(probe, request, struct.pack("40s", interface.encode()[:15]))[16:]
    return bytes(24)


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; empty if it has none."""
    answer = _ask(interface, _SIOCGIFADDR)
    return socket.inet_ntoa(answer[4:8]) if any(answer) else ""


def mtu_of(interface: str) -> int:
    return int.from_bytes(_ask(interface, _SIOCGIFMTU)[:4], sys.byteorder)


def is_running(interface: str) -> bool:
    return bool(int.from_bytes(_ask(interface, _SIOCGIFFLAGS)[:2], sys.byteorder) & _RUNNING)


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address."""
    if is_loopback(address):
        return "lo"
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)
