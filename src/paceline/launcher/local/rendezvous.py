"""The rendezvous for torch's elastic agent, and the TCPStore of the ranks.

A single node listens on loopback only. With several nodes, the coordinator (cluster/coordinator.py) opens a new store
for every start of the ranks, so that it contains nothing of an earlier one.
"""

from __future__ import annotations

import socket
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.config.launch import Endpoint
from paceline.launcher.network import LOOPBACK, listen

_STORE_SECONDS = 300.0
_REACH_SECONDS = 60.0  # to connect to the store of the coordinator


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


class StaticRendezvous(RendezvousHandler):
    """Node `node` of `nodes`; all nodes know their rank already."""

    def __init__(self, store: Store, host: str, port: int, node: int = 0, nodes: int = 1) -> None:
        self._store, self._node, self._nodes = store, node, nodes
        self.host, self.port = host, port
        self._id = uuid.uuid4().hex

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "paceline"

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore("launchers", self._store)
        return RendezvousInfo(store, self._node, self._nodes, RendezvousStoreInfo(self.host, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._id

    def shutdown(self) -> bool:
        return True


def one_node(port: int | None) -> StaticRendezvous:
    """Rendezvous of a single node, at `port` or a free one."""
    listener = listen(LOOPBACK, port)
    number: int = listener.getsockname()[1]
    return StaticRendezvous(open_store(listener), LOOPBACK, number)


def one_of_several(address: Endpoint, node: int, nodes: int) -> StaticRendezvous:
    """Rendezvous at the store that the coordinator opened."""
    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=_REACH_SECONDS), wait_for_workers=False)
    return StaticRendezvous(store, *address, node, nodes)
