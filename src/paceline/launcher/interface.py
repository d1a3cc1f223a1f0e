"""The network interface that ranks use to reach other nodes."""

from __future__ import annotations

import fcntl
import socket
import struct

from paceline.runtime.network import is_loopback

_SIOCGIFADDR = 0x8915  # Linux: get the IPv4 address of an interface


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address."""
    if is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
