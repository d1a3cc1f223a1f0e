"""What strangers do to the control port of a job of two nodes: attacks, drawn from a seed, while the job trains.

The job trains as fast as the attacks proceed: it joins among the first of them and ends among the last. Node 1 reaches
the coordinator through a relay that records what it sends, so that valid frames can be replayed.
"""

from __future__ import annotations

import random
import resource
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import nodes
from listening import connections_of, listeners
from paceline.launcher.cluster.channel import Channel, ChannelClosed
from paceline.launcher.cluster.server import _MAX_PENDING as MAX_PENDING
from paceline.runtime.network import LOOPBACK, listen

_NONCE, _HELD, _THREADS = 32, 300, 4
_BURST = 500
_TLS = bytes.fromhex("16030100c8010000c40303") + bytes(180)
_TEXTS = (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\r\n\r\n", b"EHLO a\r\n", _TLS)
_LENGTHS = (0, 1, 2, 2**20, 2**20 + 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
_STEPS = 20
_SCRIPT = f"""
import time
from pathlib import Path
import tiny

trainer = tiny.classifier_trainer(run=None, quiet=False, log_every=1, save_every=None)

def wait(*_):
    while int(Path("released").read_text() or 0) <= trainer.step_count:
        time.sleep(0.01)

trainer.model.register_forward_pre_hook(wait)
trainer.train(tiny.blobs(160), max_steps={_STEPS})
"""


class Strangers:
    """Attacks on one address, from several threads, until told to stop."""

    def __init__(self, address: tuple[str, int], seed: int, recorded: Path, done: Any, stop: Any) -> None:
        self._address, self._seed, self._recorded, self._done, self._stop = address, seed, recorded, done, stop
        self._kinds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, results: Any) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        threads = [threading.Thread(target=self._attack, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.put(dict(self._kinds))

    def _attack(self, number: int) -> None:
        draw, held = random.Random(f"{self._seed}-{number}"), deque[socket.socket](maxlen=_HELD)
        kinds = [name for name in dir(self) if name.startswith("attack_")]
        while not self._stop.is_set():
            kind = draw.choice(kinds)
            if kind == "attack_with_many_at_once" and draw.random() > 0.004:
                continue
            begun = 0
            try:
                for connection in getattr(self, kind)(draw):
                    begun += 1
                    self._leave(connection, draw, held)
            except ConnectionRefusedError:  # nobody listens yet, or any more
                time.sleep(0.01)
                continue
            except (OSError, ChannelClosed):
                begun = max(begun, 1)
            with self._lock:
                self._kinds[kind.removeprefix("attack_")] += begun
                self._done.value += begun
            self._drip(draw, held)
        for connection in held:
            connection.close()

    def _leave(self, connection: socket.socket, draw: random.Random, held: deque[socket.socket]) -> None:
        """Close it, reset it, close one half, or keep it open."""
        way = draw.random()
        if way < 0.2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if way < 0.7:
            connection.close()
            return
        if way < 0.8:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        if len(held) == _HELD:
            held.popleft().close()
        held.append(connection)

    def _drip(self, draw: random.Random, held: deque[socket.socket]) -> None:
        """One more byte on a connection that is kept open."""
        if held:
            with suppress(OSError):
                held[draw.randrange(len(held))].send(draw.randbytes(1))

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=5.0)
        connection.settimeout(1.0)
        return connection

    def _send(self, *parts: bytes) -> Iterator[socket.socket]:
        connection = self._connect()
        with suppress(OSError):
            for part in parts:
                connection.sendall(part)
        yield connection

    def attack_with_nothing(self, draw: random.Random) -> Iterator[socket.socket]:
        return self._send()

    def attack_with_random_bytes(self, draw: random.Random) -> Iterator[socket.socket]:
        return self._send(draw.randbytes(draw.choice((1, 31, 32, 33, 36, 68, 200, 5000))))

    def attack_with_another_protocol(self, draw: random.Random) -> Iterator[socket.socket]:
        return self._send(draw.choice(_TEXTS) * draw.choice((1, 1, 9)))

    def attack_with_wrong_signature(self, draw: random.Random) -> Iterator[socket.socket]:
        payload = draw.choice((b"{}", b'{"kind": "end"}', b"[" * 5000))
        return self._send(draw.randbytes(_NONCE), struct.pack(">I", len(payload)), draw.randbytes(32), payload)

    def attack_with_lengths(self, draw: random.Random) -> Iterator[socket.socket]:
        length = struct.pack(">I", draw.choice(_LENGTHS))
        return self._send(bytes(_NONCE) + length + draw.randbytes(draw.choice((0, 5, 32, 40, 2000))))

    def attack_with_truncated_frame(self, draw: random.Random) -> Iterator[socket.socket]:
        whole = bytes(_NONCE) + struct.pack(">I", 20) + draw.randbytes(52)
        return self._send(whole[: draw.randrange(len(whole))])

    def attack_with_much_data(self, draw: random.Random) -> Iterator[socket.socket]:
        return self._send(bytes(_NONCE) + struct.pack(">I", 2**20) + bytes(draw.choice((2**16, 2**18, 2**20))))

    def attack_with_single_bytes(self, draw: random.Random) -> Iterator[socket.socket]:
        return self._send(*(bytes([each]) for each in draw.randbytes(40)))

    def attack_with_replay(self, draw: random.Random) -> Iterator[socket.socket]:
        recorded = self._recorded.read_bytes()
        return self._send(recorded[: draw.choice((len(recorded), draw.randrange(len(recorded) + 1)))])

    def attack_with_reflection(self, draw: random.Random) -> Iterator[socket.socket]:
        connection = self._connect()
        greeting = connection.recv(100)
        connection.sendall(greeting[-_NONCE:] + self._recorded.read_bytes()[_NONCE:])
        yield connection

    def attack_with_another_token(self, draw: random.Random) -> Iterator[socket.socket]:
        connection = self._connect()
        channel = Channel(connection, "the token of another job", is_server=False)
        for _ in range(100):
            if channel._key is not None:
                break
            channel.receive()
            time.sleep(0.001)
        deep: Any = None
        for _ in range(draw.choice((1, 500))):
            deep = [deep]
        channel.send({"kind": draw.choice(("join", "end", "exited", "heartbeat")), "deep": deep})
        yield connection

    def attack_with_many_at_once(self, draw: random.Random) -> Iterator[socket.socket]:
        opened = []
        for _ in range(_BURST):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(self._address)
            opened.append(connection)
        yield from opened


def _relay_node(relay: socket.socket, address: tuple[str, int], recorded: Path) -> None:
    """Forward the connections of node 1, and keep what it sends. In a process of its own: threads of strangers would
    keep heartbeats back."""
    while True:
        near, _ = relay.accept()
        far = socket.create_connection(address)
        kept = recorded.open("wb", buffering=0)
        for ends in ((far, near, lambda data: None), (near, far, kept.write)):
            threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, keep: Callable[[bytes], object]) -> None:
    with suppress(OSError):
        source.settimeout(None)
        target.settimeout(None)
        while data := source.recv(1 << 16):
            keep(data)
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@dataclass
class Siege:
    """How a job fared that was attacked."""

    statuses: list[int]
    said: str
    losses: list[tuple[int, float]]
    attacks: dict[str, int]
    seconds: float
    memory: list[int] = field(default_factory=list)  # of the coordinator, in KiB, over time
    descriptors: list[int] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)  # that it has accepted and not closed
    held: int = 0  # that strangers kept open all at once


def losses_in_peace(folder: Path) -> list[tuple[int, float]]:
    """Of the same training on the same number of ranks, on one node."""
    with nodes.launchers(folder) as launch:
        job = _job(folder, launch)
        (folder / "released").write_text("1000000")
        done = launch("launch", "-n", "2", "script.py")
        assert done.end() == 0, done.said
        return job.curve()


def besiege(folder: Path, count: int, seed: int = 0) -> Siege:
    """Attack a job `count` times while it joins, trains and ends."""
    context = get_context("fork")
    began, results, stop, done = time.monotonic(), context.Queue(), context.Event(), context.Value("l", 0)
    with listen(LOOPBACK, None) as relay, nodes.launchers(folder) as launch:
        job = _job(folder, launch)
        port = int(job.master.rpartition(":")[2])
        recorded = folder / "recorded"
        recorded.touch()
        strangers = Strangers((LOOPBACK, port), seed, recorded, done, stop)
        siege = Siege([], "", [], {}, 0.0)
        first = launch("launch", "-n", "1", *job.meet(0), "script.py")
        nodes.eventually(lambda: _measure(siege, port) or siege.memory)
        _crowd_in(siege, port)
        process = context.Process(target=strangers.run, args=(results,))
        forwarding = context.Process(target=_relay_node, args=(relay, (LOOPBACK, port), recorded))
        process.start()
        forwarding.start()
        try:
            nodes.eventually(lambda: done.value > count // 20)  # then the other node has to get in
            around = ("--nodes", "2", "--node-rank", "1", "--master", f"{LOOPBACK}:{relay.getsockname()[1]}")
            second = launch("launch", "-n", "1", *around, "script.py")
            nodes.eventually(lambda: first.says("rank 0 of 2"))
            while done.value < count and first.status is None and second.status is None:
                _release(folder, _STEPS * done.value // count)
                _measure(siege, port)
                time.sleep(0.05)
            _measure(siege, port)
            _release(folder, _STEPS + 1)  # a loss is also looked at after the last step
            siege.statuses, siege.said = nodes.ended(first, second), first.said + second.said
        finally:
            stop.set()
            siege.attacks = results.get(timeout=60)
            process.join()
            forwarding.kill()
            forwarding.join()
        siege.losses, siege.seconds = job.curve(), time.monotonic() - began
    return siege


def _crowd_in(siege: Siege, port: int) -> None:
    """Open more connections than may stay, which say nothing, until the coordinator has as many as it accepts. Before
    the attacks: what strangers reset is closed at once."""
    opened: list[socket.socket] = []

    def come() -> None:
        for connection in opened:
            connection.close()
        opened[:] = [socket.socket() for _ in range(2 * MAX_PENDING)]
        for connection in opened:
            connection.setblocking(False)
            connection.connect_ex((LOOPBACK, port))

    def is_full() -> bool:
        before = siege.connections[-1]
        _measure(siege, port)
        if not opened or siege.connections[-1] < before:  # they have had their time, and nobody looked
            come()
        return siege.connections[-1] >= MAX_PENDING

    try:
        nodes.eventually(is_full)
        siege.held = len(opened)
    finally:
        for connection in opened:
            connection.close()


def _job(folder: Path, launch: Callable[..., nodes.Launcher]) -> nodes.Job:
    job = nodes.Job(folder, launch)
    (folder / "script.py").write_text(_SCRIPT)
    _release(folder, 0)
    return job


def _release(folder: Path, steps: int) -> None:
    """Let ranks train that many steps."""
    (folder / "released.new").write_text(str(steps))
    (folder / "released.new").rename(folder / "released")


def _measure(siege: Siege, port: int) -> None:
    for listener in listeners():
        if listener.port == port:
            with suppress(OSError):
                status = Path(f"/proc/{listener.pid}/status").read_text()
                siege.memory.append(int(status.partition("VmRSS:")[2].split()[0]))
                siege.descriptors.append(len(list(Path(f"/proc/{listener.pid}/fd").iterdir())))
                siege.connections.append(connections_of(listener.pid, port))
