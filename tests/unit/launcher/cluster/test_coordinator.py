"""The coordinator admits the nodes of its job, and connections from elsewhere do not disturb it."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from paceline.config.launch import LaunchSpec, NodeRange
from paceline.diagnose.exits import EXIT_STATUSES, RankExit
from paceline.launcher.cluster.channel import Channel, ChannelClosed, Message
from paceline.launcher.cluster.coordinator import Coordinator
from paceline.launcher.cluster.membership import JoinRequest
from paceline.runtime.network import LOOPBACK, listen

SECRET = "the job's own"
FINGERPRINT = {"version": {"torch": "2"}, "code": {}, "recipe": {}}
TWO = NodeRange(2, 2)


class Cluster:
    """A coordinator of two nodes, and connections to it."""

    def __init__(self) -> None:
        listener = listen(LOOPBACK, None)
        self.address = listener.getsockname()
        self.notices: list[Message] = []
        self.coordinator = Coordinator(listener, SECRET, LaunchSpec(nodes=TWO), self.notices.append)
        self.connections: list[socket.socket] = []

    def connect(self, data: bytes) -> socket.socket:
        self.connections.append(socket.create_connection(self.address))
        self.connections[-1].sendall(data)
        return self.connections[-1]

    def run(self, until: Callable[[], object], what: str) -> None:
        end = time.monotonic() + 20
        while not until():
            assert time.monotonic() < end, what
            self.coordinator.step(0.01)

    def join(self, token: str = SECRET, **changes: Any) -> tuple[Channel, list[Message]]:
        """A node that joins, and the first messages it receives."""
        channel = Channel(socket.create_connection(self.address), token, is_server=False)
        self.connections.append(channel._socket)
        received: list[Message] = []
        self.run(lambda: channel.receive() or channel._key, "no handshake")
        channel.send(JoinRequest("host", 1, TWO, None, FINGERPRINT).to_message() | changes)
        self.run(lambda: received.extend(channel.receive()) or received, "no answer")
        return channel, received

    def expect(self, channel: Channel, kind: str) -> Message:
        """The next message of that kind; others, such as heartbeats, are skipped."""
        received: list[Message] = []

        def has_arrived() -> bool:
            received.extend(message for message in channel.receive() if message["kind"] == kind)
            return bool(received)

        self.run(has_arrived, f"no {kind} message")
        return received[0]

    def expect_closed(self, connection: socket.socket) -> None:
        connection.settimeout(0.01)

        def is_closed() -> bool:
            with suppress(TimeoutError):
                try:
                    return connection.recv(1 << 16) == b""
                except ConnectionError:
                    return True
            return False

        self.run(is_closed, "the connection was not closed")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.coordinator.close()
    for each in made.connections:
        each.close()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9, random.Random(0).randbytes(5000), b"\xff" * 80]
)
def test_an_invalid_connection_is_closed_and_nodes_can_join(cluster: Cluster, data: bytes) -> None:
    connection = cluster.connect(data)
    cluster.expect_closed(connection)
    assert cluster.join()[1][0] == {"kind": "joined", "node": 0, "nodes": 2}


def test_silent_connections_do_not_disturb(cluster: Cluster) -> None:
    for _ in range(40):
        cluster.connect(b"")
    assert [cluster.join()[1][0]["kind"] for _ in range(2)] == ["joined", "joined"]


def test_a_wrong_token_is_rejected_without_an_answer(cluster: Cluster) -> None:
    with pytest.raises(ChannelClosed):
        cluster.join("another")
    (notice,) = cluster.notices
    assert notice["text"] == f"rejected a connection from {LOOPBACK}: wrong token"
    assert cluster.join()[1][0]["node"] == 0


def test_a_connection_that_is_reset_after_a_wrong_signature_does_not_disturb(cluster: Cluster) -> None:
    for _ in range(3):
        stranger = cluster.connect(bytes(32) + (2).to_bytes(4, "big") + bytes(32) + b"{}")
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
    assert [cluster.join()[1][0]["kind"] for _ in range(2)] == ["joined", "joined"]
    assert len(cluster.notices) <= 1  # a flood is not logged


@pytest.mark.parametrize(
    "changes", [{"ranks": "many"}, {"ranks": -1}, {"nodes": 7}, {"nodes": None}, {"fingerprint": 5}]
)
def test_an_invalid_join_request_is_rejected(cluster: Cluster, changes: dict[str, Any]) -> None:
    with pytest.raises(ChannelClosed):
        cluster.join(**changes)
    assert cluster.notices[0]["text"].startswith(f"rejected a connection from {LOOPBACK}: invalid message (")
    assert cluster.join()[1][0]["node"] == 0


def test_a_rejected_node_is_told_why(cluster: Cluster) -> None:
    cluster.join()
    _, received = cluster.join(fingerprint={**FINGERPRINT, "version": {"torch": "1"}})
    assert received[0]["kind"] == "rejected" and "version: torch is 2 and 1" in received[0]["error"]["what"]


def test_an_out_of_date_message_starts_nothing(cluster: Cluster) -> None:
    channel, _ = cluster.join()
    channel.send({"kind": "opened", "folder": None})
    cluster.coordinator.step(0.1)
    cluster.coordinator.step(0.1)
    assert cluster.coordinator.nodes_to_start and channel.receive() == []


def start_ranks(cluster: Cluster) -> tuple[Channel, Channel, list[Message]]:
    """Two nodes of two ranks and one rank, and what each was told to start."""
    first, second = cluster.join(ranks=2)[0], cluster.join(ranks=1)[0]
    assert cluster.expect(first, "open")["folder"] is None
    first.send({"kind": "opened", "folder": None})
    starts = [cluster.expect(each, "start") for each in (first, second)]
    for each in (first, second):
        each.send({"kind": "started", "pids": {}})
    return first, second, starts


def exited(**codes: int | None) -> Message:
    exits = [RankExit(int(rank.removeprefix("rank")), 0, code, time.time()) for rank, code in codes.items()]
    report = {"exits": [each.to_json() for each in exits], "oom_killed": [], "suspects": {}}
    return {"kind": "exited", "now": time.time(), **report}


def test_ranks_start_on_all_nodes_and_the_job_ends_when_all_have_succeeded(cluster: Cluster) -> None:
    first, second, starts = start_ranks(cluster)
    places = [(start["node"], start["nodes"], start["first_rank"], start["ranks"], start["world"]) for start in starts]
    assert places == [(0, 2, 0, 2, 3), (1, 2, 2, 1, 3)]
    assert starts[0]["store_port"] == starts[1]["store_port"] and starts[0]["generation"] == 0
    second.send(exited(rank2=0))
    first.send(exited(rank0=0, rank1=0))
    for node in (first, second):
        end = cluster.expect(node, "end")
        assert (end["status"], end["cause"], end["error"]) == (0, None, None)
    assert cluster.coordinator.status == 0


def test_a_failed_rank_stops_the_other_nodes_and_all_report_its_cause(cluster: Cluster) -> None:
    first, second, _ = start_ranks(cluster)
    second.send(exited(rank2=3))
    assert cluster.expect(first, "stop")["signal"] == 0
    first.send(exited(rank0=None, rank1=None))
    for node in (first, second):
        end = cluster.expect(node, "end")
        assert (end["status"], end["cause"]["kind"], end["cause"]["rank"], end["cause"]["node"]) == (3, "exit", 2, 1)


def test_a_node_that_disconnects_while_its_ranks_run_is_lost(cluster: Cluster) -> None:
    first, second, _ = start_ranks(cluster)
    second.close()
    cluster.expect(first, "stop")
    first.send(exited(rank0=None, rank1=None))
    end = cluster.expect(first, "end")
    assert (end["status"], end["cause"]["kind"], end["cause"]["node"]) == (EXIT_STATUSES["node-lost"], "node-lost", 1)


VALID = exited(rank2=0)
INVALID = [
    {"kind": "nonsense"},
    {"kind": "started", "pids": {"no number": None}},
    {"kind": "started", "pids": 5},
    {"kind": "interrupted", "signal": 100_000},
    {"kind": "error", "error": {}},
    {**VALID, "exits": []},
    {**VALID, "now": None},
    {**VALID, "suspects": {"2": 5}},
    {**VALID, "oom_killed": ["2", {}]},
    {**VALID, "exits": [{**VALID["exits"][0], "code": "no number"}]},
    {
        **VALID,
        "exits": [{**VALID["exits"][0], "record": {"rank": 2, "time": 0, "exit_code": 1, "text": "", "error": {}}}],
    },
]


@pytest.mark.parametrize("message", INVALID, ids=range(len(INVALID)))
def test_a_node_that_sends_an_invalid_message_is_lost(cluster: Cluster, message: Message) -> None:
    first, second, _ = start_ranks(cluster)
    second.send(message)
    cluster.expect(first, "stop")
    first.send(exited(rank0=None, rank1=None))
    end = cluster.expect(first, "end")
    assert (end["status"], end["cause"]["kind"], end["cause"]["node"]) == (EXIT_STATUSES["node-lost"], "node-lost", 1)
    assert "it sent an invalid message" in str(end["cause"])


def test_an_interrupt_reaches_every_node_and_ends_the_job(cluster: Cluster) -> None:
    first, second, _ = start_ranks(cluster)
    first.send({"kind": "interrupted", "signal": 2})
    assert cluster.expect(second, "stop")["signal"] == 2
    first.send(exited(rank0=0, rank1=0))
    second.send(exited(rank2=0))
    assert [cluster.expect(node, "end")["status"] for node in (first, second)] == [130, 130]


def test_a_second_interrupt_kills_the_ranks_of_every_node(cluster: Cluster) -> None:
    first, second, _ = start_ranks(cluster)
    first.send({"kind": "interrupted", "signal": 2})
    assert cluster.expect(second, "stop")["signal"] == 2
    first.send({"kind": "interrupted", "signal": 9})
    assert cluster.expect(second, "stop")["signal"] == 9
    first.send(exited(rank0=None, rank1=None))
    second.send(exited(rank2=None))
    assert [cluster.expect(node, "end")["status"] for node in (first, second)] == [130, 130]


def test_a_node_that_stopped_its_ranks_and_with_them_the_others_is_lost(cluster: Cluster) -> None:
    """It lost the connection for a moment, its ranks did not: SIGTERM makes all of them save and exit together."""
    first, second, _ = start_ranks(cluster)
    first.send(exited(rank0=143, rank1=143))
    cluster.expect(second, "stop")
    second.close()
    end = cluster.expect(first, "end")
    assert (end["status"], end["cause"]["kind"], end["cause"]["node"]) == (EXIT_STATUSES["node-lost"], "node-lost", 1)
