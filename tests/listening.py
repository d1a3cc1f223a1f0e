"""Listening TCP sockets of this machine, with the process that holds each."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED, _CLOSE_WAIT, _LISTEN = "01", "08", "0A"  # states, in /proc/net/tcp


@dataclass(frozen=True)
class Listener:
    pid: int
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        own = ipaddress.ip_address(self.address)
        return (getattr(own, "ipv4_mapped", None) or own).is_loopback


def listeners() -> list[Listener]:
    sockets = {}
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                sockets[f"socket:[{fields[9]}]"] = (_address(family, address), int(port, 16))
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if (target := str(descriptor.readlink())) in sockets:
                        found.append(Listener(int(process.name), *sockets[target]))
    return found


def connections_of(pid: int, port: int) -> int:
    """How many connections to a port of its own a process has accepted and not closed."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] in (_ESTABLISHED, _CLOSE_WAIT) and int(fields[1].partition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it is closed by now
            found += str(descriptor.readlink()) in inodes
    return found


def _address(family: int, text: str) -> str:
    """The kernel writes 32-bit words in the machine's order."""
    words = [bytes.fromhex(text[first : first + 8])[::-1] for first in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))
