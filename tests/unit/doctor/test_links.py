"""Links over real sockets on loopback, and what strangers can do to a server."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from paceline.doctor import links
from paceline.doctor.links import LinkServer
from paceline.runtime.network import LOOPBACK, listen

TOKEN = secrets.token_bytes(links.TOKEN_BYTES)


@pytest.fixture
def server() -> Iterator[LinkServer]:
    with closing(LinkServer(listen(LOOPBACK, None), TOKEN)) as server:
        yield server


@pytest.fixture
def answering() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Starts another kind of server, which treats its first client like this; returns its port."""
    with ExitStack() as stack:

        def start(treat: Callable[[socket.socket], None]) -> int:
            listener = stack.enter_context(listen(LOOPBACK, None))

            def run() -> None:
                connection, _ = listener.accept()
                with connection:
                    treat(connection)

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            return int(listener.getsockname()[1])

        yield start


def connect(server: LinkServer) -> socket.socket:
    return socket.create_connection((LOOPBACK, server.port), timeout=30)


def test_a_link_has_a_latency_a_bandwidth_and_no_clock_offset_on_one_machine(server: LinkServer) -> None:
    times = links.measure((LOOPBACK, server.port), TOKEN)
    assert 0 < times.latency < 1
    assert times.bandwidth > 1e6
    assert abs(times.clock_offset) < 1


@pytest.mark.parametrize("ahead", [90.0, -90.0])
def test_the_offset_of_the_clocks_is_measured_with_its_sign(ahead: float) -> None:
    with closing(LinkServer(listen(LOOPBACK, None), TOKEN, clock=lambda: time.time() + ahead)) as server:
        assert links.measure((LOOPBACK, server.port), TOKEN).clock_offset == pytest.approx(ahead, abs=1)


def test_a_client_without_the_token_gets_no_answer(server: LinkServer) -> None:
    with connect(server) as stranger:
        stranger.sendall(bytes(links.TOKEN_BYTES) + links.PING)
        assert _ends(stranger)
    with pytest.raises(OSError):
        links.ping((LOOPBACK, server.port), bytes(links.TOKEN_BYTES))


def test_silent_and_slow_clients_keep_nobody_waiting(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ANSWER_SECONDS", 600.0)  # longer than a test may take
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(server)).sendall(b"x")
        links.ping((LOOPBACK, server.port), TOKEN)


def test_of_many_clients_without_the_token_the_oldest_is_closed(server: LinkServer) -> None:
    with ExitStack() as stack:
        oldest, *_ = [stack.enter_context(connect(server)) for _ in range(links._MAX_STRANGERS + 1)]
        assert _ends(oldest)


def test_a_client_that_never_completes_its_token_is_closed(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ANSWER_SECONDS", 0.2)
    with connect(server) as stranger:
        stranger.sendall(TOKEN[:-1])
        assert _ends(stranger)


def test_an_unknown_command_ends_the_connection(server: LinkServer) -> None:
    with connect(server) as client:
        client.sendall(TOKEN + b"whatever")
        assert _ends(client)


def test_a_closed_server_listens_no_more() -> None:
    server = LinkServer(listen(LOOPBACK, None), TOKEN)
    port = server.port
    server.close()
    with pytest.raises(ConnectionRefusedError):
        links.ping((LOOPBACK, port), TOKEN)


def test_a_server_that_never_answers_is_a_timeout(
    answering: Callable[[Callable[[socket.socket], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_ANSWER_SECONDS", 0.2)
    port = answering(lambda connection: _read_all(connection))
    with pytest.raises(TimeoutError):
        links.ping((LOOPBACK, port), TOKEN)


def test_data_that_does_not_arrive_is_a_timeout_though_pings_are_answered(
    answering: Callable[[Callable[[socket.socket], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_pings(connection: socket.socket) -> None:
        connection.recv(links.TOKEN_BYTES, socket.MSG_WAITALL)
        while connection.recv(len(links.PING), socket.MSG_WAITALL) == links.PING:
            connection.sendall(bytes(8))
        _read_all(connection)

    monkeypatch.setattr(links, "_ANSWER_SECONDS", 0.5)
    port = answering(answer_pings)
    with pytest.raises(TimeoutError):
        links.measure((LOOPBACK, port), TOKEN)


def _read_all(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass


def _ends(connection: socket.socket) -> bool:
    """Whether the other side closes it without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
