"""Launches on the nodes of a Ray cluster.

    placement group     one bundle per node, so that either all nodes are reserved or none
    actor               one per bundle, on the node that Ray selected: runs `paceline node` and returns its output
    front end           this process: fetches the output from the actors, and shows it

Ray selects the nodes; everything else is the same launcher as with other backends. The front end must run on a node of
the cluster, because the launchers connect to it (`address`).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.backends.subprocesses import KILLED, LauncherProcess, OutputRelay, stop_processes
from paceline.launcher.cluster import frontend
from paceline.launcher.local import interrupts
from paceline.launcher.workload import Workload

NODE = ("-P", "-m", "paceline", "node")  # arguments of the interpreter on the nodes

_ADDRESS = re.compile(r"auto|([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
# Ray sets the threads of a worker to the number of its CPUs, which ranks share here; and the ssh connection from which
# Ray was started does not lead to the front end.
_NOT_FOR_RANKS = ("OMP_NUM_THREADS", "SSH_CONNECTION")
_CONNECT_SECONDS = 5.0
_FIRST_WAIT = 2.0  # seconds before the first message about missing resources
_REMINDER = 30.0
_POLL_SECONDS = 0.5  # a process left behind by a launcher that died may hold its pipes open
_LOST = "Ray lost the node, or failed to start an actor on it"
_STOP_SECONDS = 10.0  # in addition to `patience`, for SIGTERM and SIGKILL


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Start a launcher on each node that Ray reserves."""
    nodes = spec.node_range
    ranks = spec.ranks or spec.default_cpu_ranks
    gpu = False if spec.device == "cpu" else None
    if spec.dry_run:
        print(f"would start {ranks} ranks on each of {nodes} nodes that Ray reserves ({spec.ray})")  # noqa: T201
        return 0
    backend = RayBackend(spec.ray or "auto", nodes.most, ranks, gpu=gpu, patience=spec.grace, wait=spec.wait)
    address = spec.address or backend.address()
    wanted = replace(spec, nodes=nodes)
    return frontend.launch_on(backend, workload, wanted, [ranks] * nodes.most, address=address).status


class RayBackend:
    """Reserves `nodes` nodes with `ranks` GPUs or CPUs each (`gpu` None: GPUs if the cluster has any). `patience`:
    seconds in which launchers may exit by themselves; `wait`: seconds to wait for resources."""

    def __init__(
        self,
        address: str,
        nodes: int,
        ranks: int,
        *,
        gpu: bool | None,
        patience: float,
        wait: float = 300.0,
        arguments: Sequence[str] = NODE,
    ) -> None:
        self._patience = patience
        self._arguments = tuple(arguments)
        self._ray = _connect(address)
        self._actors: dict[int, Any] = {}
        self._running: dict[int, _ActorClient] = {}
        try:
            if gpu is None:
                gpu = self._ray.cluster_resources().get("GPU", 0) > 0
            self._bundle = {"GPU" if gpu else "CPU": ranks}
            self._group = _reserve(self._ray, self._bundle, nodes, wait)
            self.names: Sequence[str] = _host_names(self._ray, self._group, nodes)
        except BaseException:
            self._ray.shutdown()  # also releases the placement group
            raise

    def address(self) -> str:
        """The address at which the nodes of the cluster reach this one."""
        return str(self._ray.util.get_node_ip_address())

    def start(self, node: int, order: bytes) -> None:
        """Start the launcher of a node. One that is still running is stopped first."""
        if node in self._running:
            self._stop([self._running.pop(node)])
        if node not in self._actors:
            self._actors[node] = self._new_actor(node)
        self._running[node] = _ActorClient(self._ray, self._actors[node], order)

    def ended(self) -> dict[int, str]:
        exited = [node for node, each in self._running.items() if each.exit_description is not None]
        for node in exited:
            if self._running[node].actor_is_lost:
                del self._actors[node]
        return {node: self._running.pop(node).exit_description or "" for node in exited}

    def is_accident(self, reason: str) -> bool:
        return reason.startswith((KILLED, _LOST))

    def stop(self) -> None:
        clients = list(self._running.values())
        self._running.clear()
        self._stop(clients)
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):  # the cluster may have shut down
                for actor in self._actors.values():
                    self._ray.kill(actor)
                self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()
        self._actors.clear()

    def _new_actor(self, node: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        remote = self._ray.remote(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            max_concurrency=4,  # `stop` is called while `read` blocks
            scheduling_strategy=bundle,
        )
        return remote(_NodeActor).remote(self._arguments)

    def _stop(self, clients: Sequence[_ActorClient]) -> None:
        """Stop all at the same time."""
        for each in clients:
            each.stop(self._patience)
        deadline = time.monotonic() + self._patience + _STOP_SECONDS
        for each in clients:
            each.thread.join(max(0.0, deadline - time.monotonic()))


class _ActorClient:
    """The front end's side of an actor: a thread sends the order and shows the output."""

    def __init__(self, ray: Any, actor: Any, order: bytes) -> None:
        self._ray, self._actor = ray, actor
        self._relay = OutputRelay()
        self.exit_description: str | None = None  # set when the launcher has exited
        self.actor_is_lost = False
        self.thread = threading.Thread(target=self._run, args=(order,), daemon=True)
        self.thread.start()

    def stop(self, patience: float) -> None:
        self._actor.stop.remote(patience)  # the result is not awaited: the thread notices the exit

    def _run(self, order: bytes) -> None:
        status: int | str
        try:
            self._ray.get(self._actor.start.remote(order))
            while not isinstance(status := self._ray.get(self._actor.read.remote()), int):
                for stream, data in status:
                    self._relay.write(stream, data)
        except self._ray.exceptions.RayError as error:
            self.actor_is_lost = True
            status = f"{_LOST}: {str(error).strip()}"
        self._relay.finish()
        self.exit_description = self._relay.describe_exit(status)


class _NodeActor:
    """Runs launchers on its node, one after another. Its methods run in threads."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._argv = [sys.executable, *arguments]
        self._launcher: LauncherProcess | None = None

    def start(self, order: bytes) -> None:
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_RANKS}
        self._launcher = LauncherProcess(self._argv, stdout=subprocess.PIPE, env=env)
        process = self._launcher.process
        assert process.stdout and process.stderr
        self._streams = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
        self._launcher.send_order(order)

    def read(self) -> list[tuple[int, bytes]] | int:
        """New output of the launcher, each with its stream; after the end of output, the exit status."""
        assert self._launcher is not None
        while self._streams:
            ready, _, _ = select.select(list(self._streams), [], [], _POLL_SECONDS)
            if not ready and self._launcher.process.poll() is not None:
                break
            written = [(self._streams[descriptor], os.read(descriptor, 65536)) for descriptor in ready]
            for descriptor, (_, data) in zip(ready, written, strict=True):
                if not data:
                    del self._streams[descriptor]
            if written := [(stream, data) for stream, data in written if data]:
                return written
        status = self._launcher.process.wait()
        self._launcher.close()
        return status

    def stop(self, patience: float) -> None:
        if self._launcher is not None and self._launcher.process.poll() is None:
            stop_processes([self._launcher], patience)


def _connect(address: str) -> Any:
    if not _ADDRESS.fullmatch(address):
        raise LaunchError(
            "no-ray-cluster",
            f"Invalid address of a Ray cluster: {address!r}.",
            why="launchers connect to the front end, so it must run on a node of the cluster; ray:// addresses are not "
            "supported",
            fix="run with --ray auto or --ray HOST:6379 on a node of the cluster; from outside, use ray job submit",
        )
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise LaunchError("no-ray", "Ray is not installed.") from None
    try:
        _require_listener(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        with interrupts.restored(), warnings.catch_warnings():  # Ray installs a SIGTERM handler and emits warnings
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise LaunchError(
            "no-ray-cluster",
            f"No Ray cluster reachable at {address!r}: {str(error).strip()}",
            fix="check that `ray status` works on this node; with token authentication, set RAY_AUTH_MODE=token",
        ) from None
    return ray


def _require_listener(address: str) -> None:
    """Fail early: Ray itself would try to connect for more than ten minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _reserve(ray: Any, bundle: dict[str, int], nodes: int, wait: float) -> Any:
    """A placement group; waits until the cluster has the resources."""
    group = ray.util.placement_group([bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    deadline = time.monotonic() + wait
    interval = _FIRST_WAIT
    while not group.wait(min(interval, max(0.0, deadline - time.monotonic()))):
        resources = _describe_resources(ray, bundle, nodes)
        if time.monotonic() >= deadline:
            raise LaunchError(
                "no-ray-room", f"The Ray cluster had insufficient resources for {wait:.0f} s: {resources}."
            )
        log.info(f"waiting for Ray: {resources}")
        interval = _REMINDER
    return group


def _describe_resources(ray: Any, bundle: dict[str, int], nodes: int) -> str:
    [(kind, ranks)] = bundle.items()
    sizes = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
    large = sum(size >= ranks for size in sizes)
    free = ray.available_resources().get(kind, 0)
    return (
        f"requested {ranks} {kind}s on each of {nodes} nodes; {large} of {len(sizes)} nodes have that many, and "
        f"{free:g} of {sum(sizes):g} {kind}s are free"
    )


def _host_names(ray: Any, group: Any, nodes: int) -> list[str]:
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    hosts = {each["NodeID"]: each["NodeManagerHostname"] for each in ray.nodes()}
    return [hosts.get(places[node], f"node {node}") for node in range(nodes)]
