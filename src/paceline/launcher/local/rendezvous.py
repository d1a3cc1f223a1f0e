"""The rendezvous of the ranks: their TCPStore.

A single node listens on loopback only. With several nodes, the coordinator (cluster/coordinator.py) opens a new store
for every start of the ranks, so that it contains nothing of an earlier one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import TCPStore

from paceline.config.launch import Endpoint
from paceline.runtime.network import LOOPBACK, listen
from paceline.runtime.process_group import open_store

_REACH_SECONDS = 60.0  # to connect to the store of the coordinator


class Rendezvous(NamedTuple):
    """The store of the ranks, which is closed when this object is gone, and its address."""

    store: TCPStore
    host: str
    port: int


def one_node(port: int | None) -> Rendezvous:
    """Rendezvous of a single node, at `port` or a free one."""
    listener = listen(LOOPBACK, port)
    number: int = listener.getsockname()[1]
    return Rendezvous(open_store(listener), LOOPBACK, number)


def one_of_several(address: Endpoint) -> Rendezvous:
    """Rendezvous at the store that the coordinator opened; connecting to it detects early that it cannot be reached."""
    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=_REACH_SECONDS), wait_for_workers=False)
    return Rendezvous(store, *address)
