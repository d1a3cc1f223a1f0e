"""The channel between launchers accepts only messages signed with the job's token."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launcher.cluster.channel import (
    AuthenticationFailed,
    Channel,
    ChannelClosed,
    InvalidMessage,
    Message,
    connect,
    job_token,
)
from paceline.runtime.environment import TOKEN
from paceline.runtime.network import LOOPBACK, listen

SECRET = "the job's own"


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection on loopback."""
    with listen(LOOPBACK, None) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


class Relay:
    """A client and a server, and a relay between them that can record, hold and alter what is sent."""

    def __init__(self, client_token: str = SECRET, *, is_proven: bool = True) -> None:
        self._near, self._middle_near = pair()
        self._middle_far, self._far = pair()
        self.server = Channel(self._far, SECRET, is_server=True)
        self.client = Channel(self._near, client_token, is_server=False)
        self.forward(self._middle_far, self._middle_near)
        self.forward(self._middle_near, self._middle_far)
        self.client.receive()
        self.proof = self.taken_from_client()
        if is_proven:
            self._middle_far.sendall(self.proof)
            while not self.server.is_authenticated:
                assert self.server.receive() == []

    def forward(self, source: socket.socket, target: socket.socket) -> None:
        target.sendall(source.recv(1 << 16))

    def taken_from_client(self) -> bytes:
        return self._middle_near.recv(1 << 20)

    def to_server(self, data: bytes) -> list[Message]:
        """Send these bytes to the server; the messages it receives."""
        self._middle_far.sendall(data)
        return wait_for_messages(self.server)

    def to_client(self) -> list[Message]:
        self.forward(self._middle_far, self._middle_near)
        return wait_for_messages(self.client)

    def close(self) -> None:
        for each in (self._near, self._middle_near, self._middle_far, self._far):
            each.close()


def wait_for_messages(channel: Channel) -> list[Message]:
    end = time.monotonic() + 20
    while not (messages := channel.receive()):
        assert time.monotonic() < end, "no message arrived"
    return messages


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def make(token: str = SECRET, *, is_proven: bool = True) -> Relay:
        made.append(Relay(token, is_proven=is_proven))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_messages_arrive_whole_and_in_order(relay: Callable[..., Relay]) -> None:
    ends = relay()
    for number in range(3):
        ends.client.send({"kind": "started", "number": number, "text": "ü" * 1000})
    assert [message["number"] for message in ends.to_server(ends.taken_from_client())] == [0, 1, 2]
    assert ends.server.is_authenticated and not ends.client.is_authenticated
    ends.server.send({"kind": "joined"})
    assert ends.to_client() == [{"kind": "joined"}]


def test_neither_side_accepts_a_message_with_another_token(relay: Callable[..., Relay]) -> None:
    ends = relay("another", is_proven=False)
    with pytest.raises(AuthenticationFailed):
        ends.to_server(ends.proof)
    ends.server.send({"kind": "joined"})
    with pytest.raises(AuthenticationFailed):
        ends.to_client()
    assert not ends.server.is_authenticated and not ends.client.is_authenticated


def test_a_replayed_message_is_rejected(relay: Callable[..., Relay]) -> None:
    ends = relay()
    ends.client.send({"kind": "stop"})
    frame = ends.taken_from_client()
    assert ends.to_server(frame) == [{"kind": "stop"}]
    with pytest.raises(AuthenticationFailed):
        ends.to_server(frame)


def test_a_message_of_another_connection_is_rejected(relay: Callable[..., Relay]) -> None:
    one, other = relay(), relay()
    one.client.send({"kind": "stop"})
    with pytest.raises(AuthenticationFailed):
        other.to_server(one.taken_from_client())


@pytest.mark.parametrize("place", [4, 35, 36, -1])  # in the signature, and in the payload
def test_an_altered_bit_is_detected(relay: Callable[..., Relay], place: int) -> None:
    ends = relay()
    ends.client.send({"kind": "exited", "status": 0})
    frame = bytearray(ends.taken_from_client())
    frame[place] ^= 1
    with pytest.raises(AuthenticationFailed):
        ends.to_server(bytes(frame))


def test_a_large_message_before_authentication_is_rejected(relay: Callable[..., Relay]) -> None:
    with pytest.raises(ChannelClosed, match=f"message too large: {1 << 24} bytes"):
        relay(is_proven=False).to_server((1 << 24).to_bytes(4, "big"))


def test_little_is_read_before_authentication(relay: Callable[..., Relay]) -> None:
    ends = relay(is_proven=False)
    with pytest.raises(ChannelClosed, match=f"message too large: {0x01010101} bytes"):
        ends.to_server(b"\1" * (1 << 20))
    assert len(ends.server._buffer) < 1000


def test_the_size_of_authenticated_messages_is_limited(relay: Callable[..., Relay]) -> None:
    ends = relay()
    with pytest.raises(ChannelClosed, match=f"message too large: {1 << 25} bytes"):
        ends.to_server((1 << 25).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "payload", [b" ", b"{", b"[]", b"5", b"{}", b'{"kind": 5}', b"\xff", b"[" * 100_000, b"9" * 5000]
)
def test_an_authenticated_message_without_meaning_is_rejected(relay: Callable[..., Relay], payload: bytes) -> None:
    ends = relay()
    signature = ends.client._sign(payload, 1, from_server=False)
    with pytest.raises(InvalidMessage):
        ends.to_server(len(payload).to_bytes(4, "big") + signature + payload)


def test_a_channel_keeps_the_addresses_of_a_connection_that_was_reset(relay: Callable[..., Relay]) -> None:
    near, far = pair()
    with near:
        channel = Channel(near, SECRET, is_server=True)
        reset(far)
        with pytest.raises(ChannelClosed):
            wait_for_messages(channel)
        assert channel.peer_address == channel.own_address == LOOPBACK


def test_a_connection_that_was_reset_before_it_was_accepted_gives_no_channel() -> None:
    near, far = pair()
    reset(far)
    with near, pytest.raises(ChannelClosed):
        Channel(near, SECRET, is_server=True)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_connecting_to_a_closed_port_gives_no_channel() -> None:
    with listen(LOOPBACK, None) as listener:
        address = listener.getsockname()
    assert connect([address], SECRET) is None


def test_a_server_that_is_not_a_launcher_gives_no_channel() -> None:
    with listen(LOOPBACK, None) as listener, ThreadPoolExecutor() as pool:
        found = pool.submit(connect, [listener.getsockname()], SECRET)
        with listener.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert found.result(20) is None


def test_the_token_is_created_readable_by_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    made = job_token()
    path = tmp_path / ".paceline" / "token"
    assert job_token() == made == path.read_text() and len(made) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(LaunchError, match="open-token"):
        job_token()


def test_the_token_of_the_environment_takes_precedence_and_is_removed_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a token of sixteen letters")
    assert job_token() == "a token of sixteen letters" and TOKEN not in os.environ


@pytest.mark.parametrize("token", ["x", "fifteen letters", 20 * " "])
def test_a_short_token_of_the_environment_is_rejected(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(LaunchError, match=r"launch\.open-token.*PACELINE_TOKEN is shorter than 16 characters"):
        job_token()


def test_a_short_token_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    job_token()
    (tmp_path / ".paceline" / "token").write_text("")
    with pytest.raises(LaunchError, match=r"launch\.open-token.*shorter than 16 characters"):
        job_token()


def test_a_forked_child_does_not_keep_a_connection_open() -> None:
    near, far = pair()
    channel = Channel(near, SECRET, is_server=False)
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    try:
        channel.close()
        far.settimeout(20)
        assert len(far.recv(1 << 16)) == 32 and far.recv(1) == b""
    finally:
        far.close()
        for descriptor in (release, hold):
            os.close(descriptor)
        os.waitpid(child, 0)
