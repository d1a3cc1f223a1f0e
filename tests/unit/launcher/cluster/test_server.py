"""Connections to the coordinator's server: messages, and reasons why a connection was closed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from paceline.launcher.cluster.channel import AuthenticationFailed, Channel, ChannelClosed, Message
from paceline.launcher.cluster.server import ConnectionServer
from paceline.launcher.network import LOOPBACK, listen

SECRET = "the job's own token"


class Served:
    """A server, and what its clients sent to it."""

    def __init__(self) -> None:
        listener = listen(LOOPBACK, None)
        self.address = listener.getsockname()
        self.server = ConnectionServer(listener, SECRET)
        self.received: list[tuple[Channel, Message | ChannelClosed]] = []
        self.clients: list[socket.socket] = []

    def connect(self) -> socket.socket:
        self.clients.append(socket.create_connection(self.address))
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
    served.client("another token").send({"kind": "join"})
    served.serve(lambda: served.received)
    assert isinstance(served.received[0][1], AuthenticationFailed)


def test_too_many_pending_connections_are_closed_and_an_admitted_one_makes_room(served: Served) -> None:
    member = served.client()
    member.send({"kind": "join"})
    served.serve(lambda: served.received)
    served.server.admit(served.received[0][0])
    accepted = [served.connect() for _ in range(64)]
    rejected = served.connect()
    served.serve(lambda: _is_closed(rejected))
    assert not any(_is_closed(each) for each in accepted)
    member.send({"kind": "heartbeat"})
    served.serve(lambda: len(served.received) == 2)


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    with suppress(TimeoutError):
        while data := connection.recv(1 << 16):
            assert data
        return True
    return False
