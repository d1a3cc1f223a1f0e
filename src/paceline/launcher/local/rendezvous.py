"""Where the launchers of a job meet, as torch's elastic agent sees it; and the store that ranks meet in.

One node listens on loopback only. With several, the store is the coordinator's (cluster/coordinator.py), a new one for
every start of the ranks, so that nothing of an earlier start is found in it.
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
_REACH_SECONDS = 60.0  # to connect to a store that a launcher has just told of


def open_store(listener: socket.socket) -> TCPStore:
    """A store that listens where `listener` does, and closes it in the end."""
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
    """This node is number `node` of `nodes`, and everybody knows that already: there is nothing to agree on."""

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
    """Rendezvous of a single node with itself, at a free port unless one was asked for."""
    listener = listen(LOOPBACK, port)
    number: int = listener.getsockname()[1]
    return StaticRendezvous(open_store(listener), LOOPBACK, number)


def one_of_several(address: Endpoint, node: int, nodes: int) -> StaticRendezvous:
    """Rendezvous at the store that the coordinator opened."""
    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=_REACH_SECONDS), wait_for_workers=False)
    return StaticRendezvous(store, *address, node, nodes)
