"""Connections to the coordinator's server: messages, and reasons why a connection was closed."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from paceline.launcher.cluster import server
from paceline.launcher.cluster.channel import AuthenticationFailed, Channel, ChannelClosed, Message
from paceline.launcher.cluster.server import ConnectionServer
from paceline.runtime.network import LOOPBACK, listen

SECRET = "the job's own token"


class Served:
    """A server, and what its clients sent to it."""

    def __init__(self) -> None:
        listener = listen(LOOPBACK, None)
        self.address = listener.getsockname()
        self.server = ConnectionServer(listener, SECRET)
        self.received: list[tuple[Channel, Message | ChannelClosed]] = []
        self.clients: list[socket.socket] = []

    def connect(self, source: str = LOOPBACK) -> socket.socket:
        self.clients.append(socket.create_connection(self.address, source_address=(source, 0)))
        return self.clients[-1]

    def client(self, token: str = SECRET) -> Channel:
        """A channel whose handshake is complete."""
        channel = Channel(self.connect(), token, is_server=False)
        self.serve(lambda: channel.receive() or channel._key)
        return channel

    def serve(self, until: Callable[[], object]) -> None:
        end = time.monotonic() + 20
        while not until():
            assert time.monotonic() < end, "it did not happen"
            self.received += self.server.receive(0.01)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()
    for each in made.clients:
        each.close()


def test_messages_arrive_and_a_closed_connection_is_reported(served: Served) -> None:
    client = served.client()
    client.send({"kind": "join"})
    served.serve(lambda: served.received)
    ((channel, message),) = served.received
    assert message == {"kind": "join"}
    served.server.admit(channel)
    client.close()
    served.serve(lambda: len(served.received) == 2)
    assert served.received[1][0] is channel and isinstance(served.received[1][1], ChannelClosed)


def test_a_wrong_token_is_reported_as_such(served: Served) -> None:
    served.client("another token")
    served.serve(lambda: served.received)
    assert isinstance(served.received[0][1], AuthenticationFailed)


def test_a_new_connection_replaces_the_oldest_of_the_address_that_has_most(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_FAIR_SECONDS", 0.0)
    monkeypatch.setattr(server, "_MAX_PENDING", 20)
    member = served.client()
    member.send({"kind": "join"})
    served.serve(lambda: served.received)
    served.server.admit(served.received[0][0])
    lonely = served.connect("127.0.0.2")
    served.serve(lambda: _is_greeted(lonely))
    strangers = [served.connect() for _ in range(30)]
    served.serve(lambda: _is_greeted(strangers[-1]))
    closed = [_is_closed(each) for each in strangers].count(True)
    assert closed in (11, 12) and _is_closed(strangers[0])  # room may be made for one more that does not come
    assert not _is_closed(lonely)
    member.send({"kind": "heartbeat"})
    served.serve(lambda: len(served.received) == 2)


def test_a_young_connection_is_not_replaced_and_others_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FAIR_SECONDS", 1000.0)
    monkeypatch.setattr(server, "_MAX_PENDING", 4)
    first = [served.connect() for _ in range(4)]
    served.serve(lambda: all(map(_is_greeted, first)))
    waiting = served.connect()
    for _ in range(3):
        list(served.server.receive(0.01))
    assert not any(_is_closed(each) for each in first) and not _is_greeted(waiting)
    first[0].close()
    served.serve(lambda: served.received)
    served.server.drop(served.received[0][0])
    served.serve(lambda: _is_greeted(waiting))


def test_connections_wait_while_no_descriptor_is_free(served: Served) -> None:
    first = served.connect()
    served.serve(lambda: _is_greeted(first))
    waiting = [served.connect() for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        for _ in range(3):
            list(served.server.receive(0.01))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not _is_closed(first)
    served.serve(lambda: all(map(_is_greeted, waiting)))


def test_a_connection_that_never_joins_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PENDING_SECONDS", 0.05)
    slow = served.connect()
    slow.sendall(bytes(10))
    served.serve(lambda: _is_closed(slow))


def _is_greeted(connection: socket.socket) -> bool:
    connection.settimeout(0.001)
    with suppress(TimeoutError):
        return bool(connection.recv(1, socket.MSG_PEEK))
    return False


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.001)
    with suppress(TimeoutError):
        while data := connection.recv(1 << 16):
            assert data
        return True
    return False
