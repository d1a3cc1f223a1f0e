"""The channel between launchers: who has not the job's token is heard by nobody, and disturbs nobody."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.config.launch import LaunchSpec, NodeRange
from paceline.errors import LaunchError
from paceline.launcher.cluster.admission import JoinRequest
from paceline.launcher.cluster.channel import Channel, Closed, Message, connect, job_token
from paceline.launcher.cluster.coordinator import Coordinator
from paceline.launcher.network import LOOPBACK, listen
from paceline.runtime.environment import TOKEN

SECRET = "the job's own"
IDENTITY = {"version": {"torch": "2"}, "code": {}, "recipe": {}}


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection on loopback."""
    with listen(LOOPBACK, None) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


class Two:
    """A client and a server, and what goes between them: it can be seen, kept and altered on the way."""

    def __init__(self, client_token: str = SECRET, server_token: str = SECRET) -> None:
        self._near, self._middle_near = pair()
        self._middle_far, self._far = pair()
        self.server = Channel(self._far, server_token, is_server=True)
        self.client = Channel(self._near, client_token, is_server=False)
        self.carry(self._middle_far, self._middle_near)
        self.carry(self._middle_near, self._middle_far)
        self.client.receive()
        self.server.receive()

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        target.sendall(source.recv(1 << 16))

    def taken_from_client(self) -> bytes:
        return self._middle_near.recv(1 << 20)

    def to_server(self, data: bytes) -> list[Message]:
        """What the server makes of these bytes."""
        self._middle_far.sendall(data)
        return until_something(self.server)

    def to_client(self) -> list[Message]:
        self.carry(self._middle_far, self._middle_near)
        return until_something(self.client)

    def close(self) -> None:
        for each in (self._near, self._middle_near, self._middle_far, self._far):
            each.close()


def until_something(channel: Channel) -> list[Message]:
    end = time.monotonic() + 20
    while not (messages := channel.receive()):
        assert time.monotonic() < end, "nothing came"
    return messages


@pytest.fixture
def two() -> Iterator[Callable[..., Two]]:
    made: list[Two] = []

    def make(*tokens: str) -> Two:
        made.append(Two(*tokens))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_messages_arrive_whole_and_in_order(two: Callable[..., Two]) -> None:
    ends = two()
    for number in range(3):
        ends.client.send({"number": number, "text": "ü" * 1000})
    assert [message["number"] for message in ends.to_server(ends.taken_from_client())] == [0, 1, 2]
    assert ends.server.is_proven and not ends.client.is_proven
    ends.server.send({"kind": "welcome"})
    assert ends.to_client() == [{"kind": "welcome"}]


def test_neither_side_takes_a_message_of_another_token(two: Callable[..., Two]) -> None:
    ends = two("another", SECRET)
    ends.client.send({"kind": "hello"})
    with pytest.raises(Closed, match="not signed"):
        ends.to_server(ends.taken_from_client())
    ends.server.send({"kind": "welcome"})
    with pytest.raises(Closed, match="not signed"):
        ends.to_client()
    assert not ends.server.is_proven and not ends.client.is_proven


def test_a_message_that_comes_again_is_not_taken(two: Callable[..., Two]) -> None:
    ends = two()
    ends.client.send({"kind": "stop"})
    frame = ends.taken_from_client()
    assert ends.to_server(frame) == [{"kind": "stop"}]
    with pytest.raises(Closed, match="not signed"):
        ends.to_server(frame)


def test_a_message_of_another_connection_is_not_taken(two: Callable[..., Two]) -> None:
    one, other = two(), two()
    one.client.send({"kind": "stop"})
    with pytest.raises(Closed, match="not signed"):
        other.to_server(one.taken_from_client())


@pytest.mark.parametrize("place", [4, 35, 36, -1])  # in the signature, and in the text
def test_an_altered_bit_is_noticed(two: Callable[..., Two], place: int) -> None:
    ends = two()
    ends.client.send({"kind": "ended", "status": 0})
    frame = bytearray(ends.taken_from_client())
    frame[place] ^= 1
    with pytest.raises(Closed, match="not signed"):
        ends.to_server(bytes(frame))


def test_a_stranger_may_announce_no_large_message(two: Callable[..., Two]) -> None:
    with pytest.raises(Closed, match=f"a message of {1 << 24} bytes was announced"):
        two().to_server((1 << 24).to_bytes(4, "big"))


def test_a_member_may_send_more_but_not_anything(two: Callable[..., Two]) -> None:
    ends = two()
    ends.client.send({"kind": "hello"})
    ends.to_server(ends.taken_from_client())
    with pytest.raises(Closed, match=f"a message of {1 << 25} bytes was announced"):
        ends.to_server((1 << 25).to_bytes(4, "big"))


class Attended:
    """A real meeting of two nodes, and strangers that come to it."""

    def __init__(self) -> None:
        listener = listen(LOOPBACK, None)
        self.address = listener.getsockname()
        self.meeting = Coordinator(listener, SECRET, LaunchSpec(nodes=NodeRange(2, 2)), lambda message: None)
        self.strangers: list[socket.socket] = []

    def stranger(self, words: bytes) -> socket.socket:
        self.strangers.append(socket.create_connection(self.address))
        self.strangers[-1].sendall(words)
        return self.strangers[-1]

    def attend(self, until: Callable[[], object], what: str) -> None:
        end = time.monotonic() + 20
        while not until():
            assert time.monotonic() < end, what
            self.meeting.step(0.01)

    def join(self, token: str = SECRET, **changes: Any) -> tuple[Channel, list[Message]]:
        """What a node that comes is told first."""
        channel = Channel(socket.create_connection(self.address), token, is_server=False)
        self.strangers.append(channel._socket)
        heard: list[Message] = []
        self.attend(lambda: channel.receive() or channel._key, "no greeting came")
        hello = JoinRequest("host", 1, (2, 2), None, IDENTITY).tell() | changes
        channel.send(hello)
        self.attend(lambda: heard.extend(channel.receive()) or heard, "no answer came")
        return channel, heard

    def closes(self, connection: socket.socket) -> None:
        connection.settimeout(0.01)

        def is_closed() -> bool:
            with suppress(TimeoutError):
                try:
                    return connection.recv(1 << 16) == b""
                except ConnectionError:
                    return True
            return False

        self.attend(is_closed, "the connection was not closed")


@pytest.fixture
def attended() -> Iterator[Attended]:
    made = Attended()
    yield made
    made.meeting.close()
    for each in made.strangers:
        each.close()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9, os.urandom(5000), b"\xff" * 80])
def test_a_stranger_that_talks_nonsense_is_sent_away_and_nodes_are_admitted(attended: Attended, words: bytes) -> None:
    stranger = attended.stranger(words)
    attended.closes(stranger)
    assert attended.join()[1][0] == {"kind": "welcome", "node": 0, "nodes": 2}


def test_strangers_that_say_nothing_do_not_disturb(attended: Attended) -> None:
    for _ in range(40):
        attended.stranger(b"")
    assert [attended.join()[1][0]["kind"] for _ in range(2)] == ["welcome", "welcome"]


def test_a_wrong_token_is_sent_away_without_an_answer(attended: Attended) -> None:
    with pytest.raises(Closed):
        attended.join("another")
    assert attended.join()[1][0]["node"] == 0


@pytest.mark.parametrize("changes", [{"ranks": "many"}, {"nodes": 7}, {"nodes": None}])
def test_a_node_whose_words_make_no_sense_is_sent_away(attended: Attended, changes: dict[str, Any]) -> None:
    with pytest.raises(Closed):
        attended.join(**changes)
    assert attended.join()[1][0]["node"] == 0


def test_a_refused_node_is_told_why(attended: Attended) -> None:
    attended.join()
    _, heard = attended.join(identity={**IDENTITY, "version": {"torch": "1"}})
    assert heard[0]["kind"] == "refused" and "version: torch is 2 and 1" in heard[0]["error"]["what"]


def test_a_word_at_the_wrong_time_starts_nothing(attended: Attended) -> None:
    channel, _ = attended.join()
    channel.send({"kind": "opened", "folder": None})
    attended.meeting.step(0.1)
    attended.meeting.step(0.1)
    assert attended.meeting.wanted and channel.receive() == []


def test_nobody_and_something_else_at_the_address_are_no_meeting() -> None:
    with listen(LOOPBACK, None) as listener:
        address = listener.getsockname()
    assert connect([address], SECRET) is None


def test_the_token_is_the_told_one_else_one_that_only_the_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    made = job_token()
    path = tmp_path / ".paceline" / "token"
    assert job_token() == made == path.read_text() and len(made) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(LaunchError, match="open-token"):
        job_token()
    monkeypatch.setenv(TOKEN, "told")
    assert job_token() == "told"


def test_a_forked_child_does_not_hold_a_connection_open() -> None:
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
