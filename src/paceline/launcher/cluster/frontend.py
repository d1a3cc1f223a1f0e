"""The front end of a job whose launchers were started from here: by ssh, by SLURM, on a Ray cluster.

It hosts the coordinator and the store, shows what the nodes say, and starts a launcher again that died: so any node may
be lost, the first one too. Only the front end itself may not; when it goes, all nodes end.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from paceline import log
from paceline.config.launch import Endpoint, LaunchSpec, NodeRange
from paceline.errors import LaunchError
from paceline.launcher.cluster.channel import Message
from paceline.launcher.cluster.coordinator import Coordinator
from paceline.launcher.cluster.orders import NodeOrder
from paceline.launcher.local import status as local_status
from paceline.launcher.network import listen
from paceline.launcher.workload import Workload

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST_PAUSE = 30.0  # seconds between two starts of a launcher


class NodeBackend(Protocol):
    """Each runs one `paceline node`, a launcher that reads its order from standard input, and takes the end of that
    as the end of the job."""

    names: Sequence[str]  # of the nodes, for people

    def start(self, node: int, order: bytes) -> None:
        """Begin, or begin again, that node's launcher. `order` is one line."""

    def ended(self) -> dict[int, str]:
        """Nodes whose launcher is gone, with its last words for people; each is told once."""

    def stop(self) -> None:
        """End what runs; nothing stays behind."""


@dataclass(frozen=True)
class Ended:
    status: int  # for the shell
    signals: frozenset[int]  # that came here


def launch_on(
    backend: NodeBackend,
    workload: Workload,
    spec: LaunchSpec,
    ranks: Sequence[int | None],
    *,
    address: str | None = None,
) -> Ended:
    """Run it on the nodes of a backend. `address` is where they reach this machine; unless it is given this one listens
    at all of its addresses, and they try."""

    # The store is hosted here: torch is needed, and imported before anybody waits for it.
    import paceline.launcher.local.rendezvous  # noqa: F401

    token = secrets.token_hex(32)
    listener = listen(address or "0.0.0.0", spec.port)
    store_port = None if spec.port is None else spec.port + 1
    reach = [address] if address else _own_addresses()
    heard: set[int] = set()
    port = int(listener.getsockname()[1])
    endpoints = tuple(Endpoint(each, port) for each in reach)
    folder = str(Path.cwd())
    by_ssh = address is None  # then the way that ssh took is the best guess
    orders = [
        NodeOrder(
            node, token, endpoints, port, replace(spec, ranks=number), workload.target, workload.recipe, folder, by_ssh
        )
        for node, number in enumerate(ranks)
    ]
    coordinator = Coordinator(
        listener, token, spec, lambda message: _tell(message, backend.names), store_port=store_port
    )
    try:
        with _heard() as signals:
            _attend(coordinator, backend, orders, lambda: _noted(signals(), heard))
    finally:
        coordinator.close()
        backend.stop()
    assert coordinator.status is not None
    return Ended(coordinator.status, frozenset(heard))


def _noted(signals: list[int], heard: set[int]) -> list[int]:
    heard.update(signals)
    return signals


def _attend(
    coordinator: Coordinator, backend: NodeBackend, orders: Sequence[NodeOrder], signals: Callable[[], list[int]]
) -> None:
    """Until it is over: start launchers, and again when they are missed."""
    running: set[int] = set()
    present: set[int] = set()
    arrived: set[int] = set()  # nodes that were connected once
    hopeless: set[int] = set()  # that ended before they were
    tries = _Tries()
    fewest = orders[0].spec.node_range.fewest
    while not coordinator.is_over:
        for node in coordinator.nodes_to_start:
            if node not in running | hopeless and tries.may_start(node):
                running.add(node)
                backend.start(node, orders[node].line())
        coordinator.step()
        _heed(signals(), coordinator)
        before, present = present, set(range(len(orders))) - set(coordinator.missing)
        running -= before - present  # one that fell silent still runs, and is ended by its next start
        arrived |= present
        for node, words in backend.ended().items():
            running.discard(node)
            coordinator.lose(node, words or "its launcher ended")
            if node not in arrived and coordinator.status is None:
                hopeless.add(node)
                error = _never_came(backend.names[node], words)
                if len(orders) - len(hopeless) < fewest:
                    coordinator.fail(error)
                else:
                    log.info(f"{error}\n  the others go on without it")


class _Tries:
    """How often launchers were started: at once, then after 1, 2, 4 … seconds."""

    def __init__(self) -> None:
        self._number: Counter[int] = Counter()
        self._next: dict[int, float] = {}

    def may_start(self, node: int) -> bool:
        now = time.monotonic()
        if now < self._next.get(node, 0.0):
            return False
        self._number[node] += 1
        self._next[node] = now + min(2.0 ** (self._number[node] - 1), _LONGEST_PAUSE)
        return True


def _never_came(name: str, words: str) -> LaunchError:
    return LaunchError(
        "node-failed",
        f"The launcher on {name} ended before it had met the others: {words or 'without a word'}",
        fix=f"try it by hand: can {name} be reached, and is paceline installed there at the same path?",
    )


def _tell(message: Message, names: Sequence[str]) -> None:
    if message["kind"] == "waiting":
        missing = ", ".join(names[node] for node in message["missing"])
        log.info(f"waiting for nodes: {message['joined']} of {message['nodes']} joined, missing: {missing}")
    elif message["kind"] == "notice":
        log.info(message["text"])
    elif message["kind"] == "restart":
        log.info(local_status.describe_restart(message))
    elif message["kind"] == "end":
        local_status.show_end(message, None)


@contextmanager
def _heard() -> Iterator[Callable[[], list[int]]]:
    """A function that gives the signals since its last call: they are noted at any moment, and acted on in turn."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    def take() -> list[int]:
        taken = noted[:]
        del noted[: len(taken)]
        return taken

    heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup stays nohup
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield take
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heed(numbers: Sequence[int], coordinator: Coordinator) -> None:
    """To all nodes: Ctrl-C once ends in order, twice at once; SIGUSR1 asks for a checkpoint."""
    for number in numbers:
        if number == signal.SIGUSR1:
            coordinator.forward_signal(number)
        elif number == signal.SIGINT and coordinator.is_interrupted:
            coordinator.interrupt(signal.SIGKILL)
        else:
            log.info("\ninterrupted: waiting for the nodes to save")
            # SIGUSR2 is a scheduler's warning that time is short; ranks know SIGTERM as that.
            coordinator.interrupt(signal.SIGTERM if number == signal.SIGUSR2 else number)


def _own_addresses() -> list[str]:
    """Where others may reach this machine, besides what ssh tells them."""
    names = {socket.gethostname(), socket.getfqdn()}
    found = []
    for name in sorted(names):
        try:
            found += [str(each[4][0]) for each in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
        except OSError:
            continue
    return list(dict.fromkeys(found))


def with_nodes(spec: LaunchSpec, most: int) -> LaunchSpec:
    """For a backend that has `most` machines. With `--nodes 1:4`, fewer machines than there are will do."""
    fewest = spec.nodes.fewest if spec.nodes else most
    if fewest > most:
        raise LaunchError("bad-number", f"--nodes asks for {fewest}, but there are {most} machines.")
    return replace(spec, nodes=NodeRange(fewest, most))
