"""The TCPStore in which the ranks of a job find each other.

It authenticates nobody, so it should listen on one address. torch's own listens on all: the process that hosts it opens
one on a socket of its own first, which a store that torch opens at that port shares (`multi_tenant`).
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from paceline.runtime.network import LOOPBACK, is_loopback, listen, own_addresses_of

_STORE_SECONDS = 300.0


def open_store(listener: socket.socket) -> TCPStore:
    """A store on an existing listener, which it takes over."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        LOOPBACK if host in ("0.0.0.0", "::") else host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_STORE_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def open_store_at(host: str, port: int) -> TCPStore | None:
    """A store at the address of a host name. None if it is not clear at which address other machines look for it: the
    name has several or is that of another machine, or leads to loopback here only (Debian, in /etc/hosts)."""
    own = own_addresses_of(host)
    if len(own) != 1 or (is_loopback(own[0]) and own[0] != host):
        return None
    return open_store(listen(own[0], port))
