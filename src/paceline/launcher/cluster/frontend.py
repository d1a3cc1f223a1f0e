"""The front end of a job, which starts the launchers of all nodes: over ssh, with srun, or on a Ray cluster.

It hosts the coordinator and the store, shows the output of the nodes, and restarts launchers that died, so the job
survives the loss of any node. If the front end itself exits, all nodes exit.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline import log
from paceline.config.launch import Endpoint, LaunchSpec, NodeRange
from paceline.errors import LaunchError
from paceline.launcher.cluster.channel import Message
from paceline.launcher.cluster.coordinator import Coordinator
from paceline.launcher.cluster.fingerprint import NodeOrder
from paceline.launcher.local import hang_detector, interrupts
from paceline.launcher.local import status as local_status
from paceline.launcher.workload import Workload
from paceline.runtime.network import listen

_MAX_PAUSE = 30.0  # seconds between two starts of a launcher
_MOST_STARTS = 7  # of a launcher that never joins, by accident: a minute of pauses, and what the starts take


class NodeBackend(Protocol):
    """Runs `paceline node` on each node: a launcher that reads its order from standard input, and exits when that is
    closed."""

    names: Sequence[str]  # of the nodes, for messages

    def start(self, node: int, order: bytes) -> None:
        """Start or restart the launcher of a node. `order` is one line."""

    def ended(self) -> dict[int, str]:
        """Nodes whose launcher has exited since the last call, each with a description of the exit."""

    def is_accident(self, reason: str) -> bool:
        """Whether a launcher that ended for this reason may well join if it is started again."""

    def stop(self) -> None:
        """Stop all launchers."""


@dataclass(frozen=True)
class Ended:
    status: int  # for the shell
    signals: frozenset[int]  # received by the front end


def launch_on(
    backend: NodeBackend,
    workload: Workload,
    spec: LaunchSpec,
    ranks: Sequence[int | None],
    *,
    address: str | None = None,
) -> Ended:
    """Run the workload on the nodes of a backend. `address` is where they reach this machine; by default, it listens on
    all interfaces, and the nodes try its addresses."""

    # Imported before any node waits: the store needs torch.
    import paceline.runtime.process_group  # noqa: F401

    token = secrets.token_hex(32)
    listener = listen(address or "0.0.0.0", spec.port)
    port = int(listener.getsockname()[1])
    endpoints = tuple(Endpoint(each, port) for each in ([address] if address else _own_addresses()))
    order = NodeOrder(
        node=0, token=token, coordinator=endpoints, port=port, spec=spec, target=workload.target,
        recipe=workload.recipe, folder=str(Path.cwd()), by_ssh=address is None,
    )  # fmt: skip
    orders = [replace(order, node=node, spec=replace(spec, ranks=number)) for node, number in enumerate(ranks)]
    coordinator = Coordinator(
        listener, token, spec, lambda message: _show(message, backend.names),
        store_port=None if spec.port is None else spec.port + 1,
    )  # fmt: skip
    try:
        with interrupts.noted(*interrupts.HANDLED, signal.SIGUSR2) as signals:
            _supervise(coordinator, backend, orders, signals)
    finally:
        coordinator.close()
        backend.stop()
    assert coordinator.status is not None
    return Ended(coordinator.status, frozenset(signals))


def _supervise(
    coordinator: Coordinator, backend: NodeBackend, orders: Sequence[NodeOrder], signals: Sequence[int]
) -> None:
    """Start launchers, and restart them when they are lost, until the job is over."""
    running: set[int] = set()
    starting: set[int] = set()  # nodes whose launcher has not joined since it was started
    joined: set[int] = set()
    ever_joined: set[int] = set()
    failed: set[int] = set()  # nodes whose launcher is not started any more
    handled = 0  # number of signals
    backoff = _Backoff()
    fewest = orders[0].spec.node_range.fewest
    while not coordinator.is_over:
        for node in coordinator.nodes_to_start:
            if node not in running | failed and backoff.may_start(node):
                running.add(node)
                starting.add(node)
                backend.start(node, orders[node].line())
        coordinator.step()
        for number in signals[handled:]:
            handled += 1
            _handle_signal(number, coordinator)
        before, joined = joined, set(range(len(orders))) - set(coordinator.missing)
        running -= before - joined  # a silent launcher is stopped by its next start
        ever_joined |= joined
        starting -= joined
        for node, reason in backend.ended().items():
            running.discard(node)
            coordinator.lose(node, reason)
            if node not in starting or coordinator.status is not None:
                continue
            name, by_accident = backend.names[node], backend.is_accident(reason)
            if node in ever_joined or (by_accident and backoff.starts[node] < _MOST_STARTS):
                how = reason.partition("\n")[0]
                log.info(f"the launcher on {name} did not start ({how}); starting it again")
                continue
            failed.add(node)
            error = _node_unavailable(name, reason) if by_accident else _node_failed(name, reason)
            if len(orders) - len(failed) < fewest:
                coordinator.fail(error)
            else:
                log.info(f"{error}\n  continuing without it")


class _Backoff:
    """Delays the restarts of a launcher: none, then 1, 2, 4 … seconds."""

    def __init__(self) -> None:
        self.starts: Counter[int] = Counter()
        self._next: dict[int, float] = {}

    def may_start(self, node: int) -> bool:
        now = time.monotonic()
        if now < self._next.get(node, 0.0):
            return False
        self.starts[node] += 1
        self._next[node] = now + min(2.0 ** (self.starts[node] - 1), _MAX_PAUSE)
        return True


def _node_failed(name: str, reason: str) -> LaunchError:
    return LaunchError(
        "node-failed",
        f"The launcher on {name} exited before it joined: {reason}",
        fix=f"check that {name} is reachable, and that paceline is installed there under the same path",
    )


def _node_unavailable(name: str, reason: str) -> LaunchError:
    return LaunchError(
        "node-unavailable",
        f"The launcher on {name} did not start in {_MOST_STARTS} attempts: {reason}",
        fix=f"check {name} and the scheduler (SLURM: sinfo, scontrol ping), then run the same command again",
    )


def _show(message: Message, names: Sequence[str]) -> None:
    if message["kind"] == "end":
        local_status.show_end(message, None)
    elif message["kind"] in ("hang", "continued"):
        hang_detector.show(message, None)
    elif text := local_status.describe_progress(message, names):
        log.info(text)


def _handle_signal(number: int, coordinator: Coordinator) -> None:
    """Forward a signal to all nodes. A second Ctrl-C kills the ranks; SIGUSR1 requests a checkpoint."""
    if number == signal.SIGUSR1:
        coordinator.forward_signal(number)
    elif number == signal.SIGINT and coordinator.is_interrupted:
        coordinator.interrupt(signal.SIGKILL)
    else:
        log.info("\ninterrupted: waiting for ranks to save")
        # SIGUSR2 is the warning of a scheduler before its time limit. Ranks handle it as SIGTERM.
        coordinator.interrupt(signal.SIGTERM if number == signal.SIGUSR2 else number)


def _own_addresses() -> list[str]:
    """Addresses of this machine's name, at which nodes may reach it."""
    names = {socket.gethostname(), socket.getfqdn()}
    found = []
    for name in sorted(names):
        try:
            found += [str(each[4][0]) for each in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
        except OSError:
            continue
    return list(dict.fromkeys(found))


def with_nodes(spec: LaunchSpec, most: int) -> LaunchSpec:
    """The spec for a backend with `most` nodes; `--nodes` may set a lower minimum."""
    fewest = spec.nodes.fewest if spec.nodes else most
    if fewest > most:
        raise LaunchError("bad-number", f"Invalid value for --nodes: {spec.nodes}. Only {most} nodes are available.")
    return replace(spec, nodes=NodeRange(fewest, most))
