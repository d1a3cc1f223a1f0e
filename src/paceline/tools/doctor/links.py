"""Measures the link between two machines: its latency, its bandwidth, and how far apart their clocks are; and judges
the nodes of a job and their links.

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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from statistics import median

from paceline.text import plural
from paceline.tools.doctor.finding import Finding, Status, graded

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
    return _number(connection, _ANSWER_SECONDS)


def _number(connection: socket.socket, seconds: float) -> float:
    [value] = _CLOCK.unpack(_receive(connection, _CLOCK.size, seconds))
    return float(value)


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
    return _number(connection, max(left, 0.1))


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


_SLOW_LATENCY = 2e-3  # seconds
_SLOW_BANDWIDTH = 0.5e9  # bits per second: less than half of what the slowest cluster network, 1 Gbit/s Ethernet, has
# From here on, a busy processor may limit a single stream: a difference says nothing about the link.
_SURE_BANDWIDTH = 5e9
_CLOCK_WARN, _CLOCK_FAIL = 1.0, 60.0  # seconds
_SHOWN = 3  # links in a finding
_NO_GPU = "no GPU: training uses the CPU"


@dataclass(frozen=True)
class NodeFacts:
    """What a node says about itself. `findings`: of its local checks, as JSON."""

    host: str
    address: str  # at which it listens for the other nodes
    port: int
    interface: str
    mtu: int
    versions: dict[str, str]
    gpus: list[str]  # models
    findings: list[dict[str, str]]


@dataclass(frozen=True)
class Link:
    """A connection from one node to another, by their numbers."""

    source: int
    target: int
    times: LinkTimes | None = None
    error: str = ""  # why there are no times
    is_open: bool = True  # whether a connection could be made


def names_of(nodes: Sequence[NodeFacts]) -> list[str]:
    """Host names, with the number of the node where several have the same."""
    hosts = Counter(node.host for node in nodes)
    return [each.host if hosts[each.host] == 1 else f"{each.host} (node {i})" for i, each in enumerate(nodes)]


def judge_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Whether the nodes are alike."""
    names = names_of(nodes)
    models = [", ".join(f"{count} × {model}" for model, count in Counter(node.gpus).items()) for node in nodes]
    versions = [", ".join(f"{name} {version}" for name, version in node.versions.items()) for node in nodes]
    low = min(node.mtu for node in nodes)
    shrink = [
        f"on {name}: sudo ip link set dev {node.interface} mtu {low}"
        for name, node in zip(names, nodes, strict=True) if node.mtu > low
    ]  # fmt: skip
    found = [_alike("versions", names, versions, "fail", "on nodes")]
    if any(models) and not all(models):
        found.append(_alike("GPUs", names, [each or "no GPU" for each in models], "fail", "on some nodes"))
    else:
        found.append(_alike("GPUs", names, [each or _NO_GPU for each in models], "warn", "on nodes"))
    if low:  # known on every node
        found.append(_alike("MTU", names, [str(node.mtu) for node in nodes], "warn", commands="; ".join(shrink)))
    return found


def _alike(
    check: str, names: Sequence[str], values: Sequence[str], status: Status, case: str = "", commands: str = ""
) -> Finding:
    if len(set(values)) == 1:
        return Finding(check, "ok", f"{values[0]}{' on every node' * (len(values) > 1)}")
    groups: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        groups.setdefault(value, []).append(name)
    what = "; ".join(f"{', '.join(who)}: {value}" for value, who in groups.items())
    return graded(check, status, what, case, commands=commands)


def judge_links(nodes: Sequence[NodeFacts], links: Sequence[Link]) -> list[Finding]:
    names = names_of(nodes)
    if not links:
        return []
    findings = [_broken(nodes, names, link) for link in links if link.times is None]
    good = [(f"{names[link.source]} → {names[link.target]}", link.times) for link in links if link.times is not None]
    if not findings:
        what = f"{plural(len(nodes), 'node')} connect to each other in both directions ({len(links)} links)"
        findings.append(Finding("connections", "ok", what))
    if good:
        findings += [_judge_latency(good), _judge_bandwidth(good)]
        findings += _judge_clocks(names, links)
    return findings


def _broken(nodes: Sequence[NodeFacts], names: Sequence[str], link: Link) -> Finding:
    here, there = nodes[link.source], nodes[link.target]
    way = f"{names[link.source]} ({here.address}) to {names[link.target]} ({there.address}:{there.port})"
    if not link.is_open:
        what, host = f"No connection from {way}: {link.error}.", names[link.target]
        return graded("connections", "fail", what, "closed", host=host, on=host, command=open_ports(here.address))
    what, host = f"Large messages do not arrive from {way}: {link.error}. Small ones do.", names[link.source]
    ping = f"ping -M do -s {here.mtu - 28} {there.address}"
    return graded("connections", "fail", what, "large", host=host, on=host, ping=ping, interface=here.interface)


def _judge_latency(links: Sequence[tuple[str, LinkTimes]]) -> Finding:
    found = sorted(((format_ms(times.latency), way, times.latency) for way, times in links), key=itemgetter(2))[::-1]
    slow = [each for each in found if each[2] > _SLOW_LATENCY]
    if not slow:
        return Finding("latency", "ok", f"at most {found[0][0]} for a round trip ({found[0][1]})")
    return graded("latency", "warn", f"Slow round trips: {_list(slow)}.")


def _judge_bandwidth(links: Sequence[tuple[str, LinkTimes]]) -> Finding:
    found = sorted(
        ((f"{times.bandwidth / 1e9:.2g} Gbit/s", way, times.bandwidth) for way, times in links), key=itemgetter(2)
    )
    usual = median(each[2] for each in found)
    slow = [each for each in found if each[2] < max(_SLOW_BANDWIDTH, min(usual / 2, _SURE_BANDWIDTH))]
    if not slow:
        return Finding("bandwidth", "ok", f"at least {found[0][0]} in one TCP stream ({found[0][1]})")
    return graded("bandwidth", "warn", f"Slow links: {_list(slow)}.", median=f"{usual / 1e9:.2g} Gbit/s")


def _list(slow: Sequence[tuple[str, str, float]]) -> str:
    shown = ", ".join(f"{way} {text}" for text, way, _ in slow[:_SHOWN])
    return shown + (f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else "")


def _judge_clocks(names: Sequence[str], links: Sequence[Link]) -> list[Finding]:
    """Relative to the first node."""
    offsets: dict[int, float] = {}
    for link in links:
        if link.times is not None and link.source == 0:
            offsets[link.target] = link.times.clock_offset
        elif link.times is not None and link.target == 0:
            offsets.setdefault(link.source, -link.times.clock_offset)
    found = [judge_clock(offset, names[0], names[node]) for node, offset in sorted(offsets.items())]
    if bad := [each for each in found if each.status != "ok"]:
        return bad
    most = max((abs(offset) for offset in offsets.values()), default=0.0)
    return [Finding("clock", "ok", f"at most {format_ms(most)} from that of {names[0]}")] * bool(offsets)


def judge_clock(offset: float, reference: str, host: str) -> Finding:
    """`offset`: seconds by which the clock of `host` is ahead of the reference."""
    if abs(offset) <= _CLOCK_WARN:
        return Finding("clock", "ok", f"{format_ms(abs(offset))} from that of {reference}", host=host)
    way = "ahead of" if offset > 0 else "behind"
    status: Status = "fail" if abs(offset) > _CLOCK_FAIL else "warn"
    what = f"The clock of {host} is {abs(offset):.1f} s {way} that of {reference}."
    return graded("clock", status, what, "apart", host=host, on=host)


def format_ms(seconds: float) -> str:
    """`0.024 ms`, `5.1 ms`, `1410 ms`"""
    seconds = max(seconds, 1e-6)
    return f"{seconds * 1e3:.{3 if seconds < 1e-3 else 1 if seconds < 0.1 else 0}f} ms"


def open_ports(source: str) -> str:
    """A command that lets another machine connect to this one."""
    family = "ip6" if ":" in source else "ip"
    return (
        f"sudo ufw allow proto tcp from {source} to any port 1024:65535; without ufw: "
        f"sudo nft insert rule inet filter input {family} saddr {source} tcp dport 1024-65535 accept"
    )
