"""Measures the link between two machines: its latency, its bandwidth, and how far apart their clocks are.

One machine runs a `LinkServer`, the other calls `measure`. Like iperf3 with one TCP stream, and nothing to install.

    client: token                     nobody else is answered
    client: PING                      server: its clock; any number of times
    client: SEND, then data           server: the bits per second at which it arrived; the client then closes

Every connection has a thread of its own and a deadline, so no client keeps the others waiting.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

CONNECT_SECONDS = 3.0
LINK_SECONDS = 10.0  # the most that a measurement takes, from connecting to the result
TOKEN_BYTES = 32
PING, SEND = b"ping....", b"send...."

_CLOCK = struct.Struct("!d")
_PINGS, _PING_SECONDS = 100, 2.0
_SEND_BYTES, _SEND_SECONDS = 64 << 20, 0.5
_WINDOW = 16 << 20  # bytes
_ANSWER_SECONDS = 3.0
_MAX_STRANGERS = 64  # connections that have not sent the token; with one more, the oldest is closed


@dataclass(frozen=True)
class LinkTimes:
    latency: float  # seconds of a round trip of 8 bytes: the median
    bandwidth: float  # bits per second, from the client to the server
    clock_offset: float  # seconds by which the server's clock is ahead


class LinkServer:
    """Answers clients on `listener`, which it takes over, until it is closed."""

    def __init__(self, listener: socket.socket, token: bytes, clock: Callable[[], float] = time.time) -> None:
        self._listener, self._token, self._clock = listener, token, clock
        self._strangers: deque[socket.socket] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            with suppress(OSError):  # this one is gone already
                connection, _ = self._listener.accept()
                self._strangers.append(connection)
                if len(self._strangers) > _MAX_STRANGERS:
                    with suppress(OSError):
                        self._strangers.popleft().shutdown(socket.SHUT_RDWR)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            try:
                token = _receive(connection, TOKEN_BYTES, _ANSWER_SECONDS)
            finally:
                with suppress(ValueError):  # it was closed as the oldest
                    self._strangers.remove(connection)
            if not hmac.compare_digest(token, self._token):
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            deadline = time.monotonic() + LINK_SECONDS
            while (command := _receive(connection, len(PING), deadline - time.monotonic())) == PING:
                connection.sendall(_CLOCK.pack(self._clock()))
            if command == SEND:
                connection.sendall(_CLOCK.pack(_receive_rate(connection)))
                # Closing with unread data would reset the connection, and might discard the answer.
                while connection.recv(1 << 20) and time.monotonic() < deadline:
                    pass


def ping(address: tuple[str, int], token: bytes) -> None:
    """Connect, and wait for one answer. Raises OSError if the link cannot be used."""
    with _connect(address, token) as connection:
        _ping(connection)


def measure(address: tuple[str, int], token: bytes, clock: Callable[[], float] = time.time) -> LinkTimes:
    """Raises OSError if the link cannot be used."""
    with _connect(address, token) as connection:
        trips: list[float] = []
        offsets: list[float] = []
        end = time.monotonic() + _PING_SECONDS
        while len(trips) < _PINGS and (not trips or time.monotonic() < end):
            began, sent = time.perf_counter(), clock()
            there = _ping(connection)
            trips.append(time.perf_counter() - began)
            offsets.append(there - (sent + clock()) / 2)
        bandwidth = _send(connection)
        # Discards what is not sent yet, which would slow down the next measurement.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return LinkTimes(median(trips), bandwidth, offsets[trips.index(min(trips))])


def _connect(address: tuple[str, int], token: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    return connection


def _ping(connection: socket.socket) -> float:
    connection.sendall(PING)
    return _unpack(_receive(connection, _CLOCK.size, _ANSWER_SECONDS))


def _send(connection: socket.socket) -> float:
    """Send until the server answers with the rate."""
    connection.sendall(SEND)
    connection.setblocking(False)
    data = bytes(1 << 20)
    deadline = time.monotonic() + _SEND_SECONDS + _ANSWER_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        readable, writable, _ = select.select([connection], [connection], [], left)
        if readable:
            break
        if writable:
            with suppress(BlockingIOError):
                connection.send(data)
    return _unpack(_receive(connection, _CLOCK.size, max(left, 0.1)))


def _receive_rate(connection: socket.socket) -> float:
    """Bits per second: of the fastest window, because a machine that is busy for a moment is not a slow link; over all
    that arrived if that is less than a window."""
    buffer = bytearray(1 << 20)
    connection.settimeout(2 * _ANSWER_SECONDS)  # longer than the client, which then says that it timed out
    total = connection.recv_into(buffer)
    began = window_began = time.perf_counter()
    in_window, best = 0, 0.0
    while total < _SEND_BYTES and (left := began + _SEND_SECONDS - time.perf_counter()) > 0:
        connection.settimeout(left)
        try:
            size = connection.recv_into(buffer)
        except TimeoutError:
            break
        if not size:
            raise ConnectionError("closed by the other side")
        total, in_window, now = total + size, in_window + size, time.perf_counter()
        if in_window >= _WINDOW:
            best, in_window, window_began = max(best, in_window / (now - window_began)), 0, now
    connection.settimeout(_ANSWER_SECONDS)
    return 8 * (best or total / (time.perf_counter() - began))


def _receive(connection: socket.socket, size: int, seconds: float) -> bytes:
    """Exactly `size` bytes."""
    deadline, data = time.monotonic() + seconds, b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := connection.recv(size - len(data))):
            raise ConnectionError("closed by the other side")
        data += more
    connection.settimeout(_ANSWER_SECONDS)
    return data


def _unpack(data: bytes) -> float:
    [value] = _CLOCK.unpack(data)
    return float(value)
