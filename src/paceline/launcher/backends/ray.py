"""Machines of a Ray cluster.

    placement group     one bundle for each node, so that all of them are reserved, or none
    actor               in each bundle, on the machine that Ray chose: runs `paceline node`, passes on what it writes
    front end           this process: asks the actors for the words of their launchers, and shows them

Ray decides where; from there on it is the same launcher as everywhere. The front end has to run on a machine of the
cluster, because the nodes come back to it (`address`).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import select
import signal
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
from paceline.launcher.backends.subprocesses import OutputRelay, describe_exit, write_order
from paceline.launcher.cluster import frontend
from paceline.launcher.local import interrupts
from paceline.launcher.workload import Workload

NODE = ("-P", "-m", "paceline", "node")  # for the interpreter that Ray runs there

_ADDRESS = re.compile(r"auto|([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
# Ray gives a worker as many threads as it has CPUs, but here ranks share these; and how somebody logged in to start Ray
# says nothing about where the front end is.
_NOT_FOR_RANKS = ("OMP_NUM_THREADS", "SSH_CONNECTION")
_CONNECT_SECONDS = 5.0
_FIRST_WAIT = 2.0  # seconds in which a cluster with room gives it, so that nothing need be said
_SAY_EVERY = 30.0
_LOOK_SECONDS = 0.5  # a launcher that died may have left somebody who holds its pipes open
_TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Start a launcher on each node that a Ray cluster gives."""
    nodes = spec.node_range
    ranks = spec.ranks or spec.default_cpu_ranks
    gpu = False if spec.device == "cpu" else None
    backend = RayBackend(spec.ray or "auto", nodes.most, ranks, gpu=gpu, patience=spec.grace, wait=spec.wait)
    address = spec.address or backend.address()
    return frontend.launch_on(
        backend, workload, replace(spec, nodes=nodes), [ranks] * nodes.most, address=address
    ).status


class RayBackend:
    """As many machines as `nodes`, each with `ranks` CPUs or GPUs (`gpu` None: GPUs where the cluster has any).
    `patience` is how long launchers get to end by themselves, `wait` how long the cluster gets to have room."""

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
        self._running: dict[int, _NodeActor] = {}
        try:
            if gpu is None:
                gpu = self._ray.cluster_resources().get("GPU", 0) > 0
            self._bundle = {"GPU" if gpu else "CPU": ranks}
            self._group = _reserve(self._ray, self._bundle, nodes, wait)
            self.names: Sequence[str] = _host_names(self._ray, self._group, nodes)
        except BaseException:
            self._ray.shutdown()  # and with it goes what was reserved
            raise

    def address(self) -> str:
        """Where the machines of the cluster reach this one."""
        return str(self._ray.util.get_node_ip_address())

    def start(self, node: int, order: bytes) -> None:
        """Begin that node's launcher; where an old one still runs, it is ended first."""
        if node in self._running:
            self._end([self._running.pop(node)])
        if node not in self._actors:
            self._actors[node] = self._new_actor(node)
        self._running[node] = _NodeActor(self._ray, self._actors[node], order)

    def ended(self) -> dict[int, str]:
        gone = [node for node, launcher in self._running.items() if launcher.last_words is not None]
        for node in gone:
            if self._running[node].actor_is_lost:
                del self._actors[node]
        return {node: self._running.pop(node).last_words or "" for node in gone}

    def stop(self) -> None:
        launchers = list(self._running.values())
        self._running.clear()
        self._end(launchers)
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):  # the cluster may be what has ended
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
            max_concurrency=4,  # it can be told to end while somebody waits for its words
            scheduling_strategy=bundle,
        )
        return remote(_NodeLauncher).remote(self._arguments)

    def _end(self, launchers: Sequence[_NodeActor]) -> None:
        """All at once: each gets the same time to end by itself."""
        for launcher in launchers:
            launcher.let_go(self._patience)
        until = time.monotonic() + self._patience + 2 * _TERM_SECONDS
        for launcher in launchers:
            launcher.thread.join(max(0.0, until - time.monotonic()))


class _NodeActor:
    """One launcher behind an actor, and the thread that gives it the order and shows what it says."""

    def __init__(self, ray: Any, actor: Any, order: bytes) -> None:
        self._ray, self._actor = ray, actor
        self._relay = OutputRelay()
        self.last_words: str | None = None  # once it is gone
        self.actor_is_lost = False
        self.thread = threading.Thread(target=self._tend, args=(order,), daemon=True)
        self.thread.start()

    def let_go(self, patience: float) -> None:
        self._actor.end.remote(patience)  # nobody waits for the answer: the thread sees the end

    def _tend(self, order: bytes) -> None:
        try:
            self._ray.get(self._actor.begin.remote(order))
            while not isinstance(written := self._ray.get(self._actor.read.remote()), int):
                for stream, data in written:
                    self._relay.write(stream, data)
            how = describe_exit(written)
        except self._ray.exceptions.RayError as error:
            self.actor_is_lost = True
            how = "Ray lost the machine, or could not start there: " + str(error).strip()
        self._relay.finish()
        self.last_words = "\n".join([how, *self._relay.last_lines()])


class _NodeLauncher:
    """The actor: on its machine it runs a launcher, one after another. Its methods run in threads."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._argv = [sys.executable, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, order: bytes) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_RANKS}
        self._has_order = False
        self._process = process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environment,
        )
        assert process.stdin and process.stdout and process.stderr
        self._streams = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
        write_order(process.stdin.fileno(), order)
        self._has_order = True

    def read(self) -> list[tuple[int, bytes]] | int:
        """What the launcher wrote since; and its exit status when that was all."""
        assert self._process is not None
        while self._streams:
            ready, _, _ = select.select(list(self._streams), [], [], _LOOK_SECONDS)
            if not ready and self._process.poll() is not None:
                break
            written = [(self._streams[descriptor], os.read(descriptor, 65536)) for descriptor in ready]
            for descriptor, (_, data) in zip(ready, written, strict=True):
                if not data:
                    del self._streams[descriptor]
            if written := [(stream, data) for stream, data in written if data]:
                return written
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
        return status

    def end(self, patience: float) -> None:
        """Tell the launcher that nobody is here any more; later a SIGTERM, and at last a SIGKILL."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        assert process.stdin
        if self._has_order:
            process.stdin.close()
            _wait(process, patience)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                _wait(process, _TERM_SECONDS)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _connect(address: str) -> Any:
    if not _ADDRESS.fullmatch(address):
        raise LaunchError(
            "no-ray-cluster",
            f"{address!r} is no address of a Ray cluster.",
            why="the front end has to be on a machine of the cluster, because the nodes come back to it; through "
            "ray:// it would not be",
            fix="--ray auto on a machine of the cluster, or --ray HOST:6379; from outside: ray job submit",
        )
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise LaunchError("no-ray", "Ray is not installed here.", fix="pip install 'paceline[ray]'") from None
    try:
        _require_listener(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        with interrupts.restored(), warnings.catch_warnings():  # it installs a handler of SIGTERM, and gives advice
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise LaunchError(
            "no-ray-cluster",
            f"No Ray cluster answers at {address!r}: {str(error).strip()}",
            fix="see that `ray status` works on this machine; one that asks for a token needs RAY_AUTH_MODE=token",
        ) from None
    return ray


def _require_listener(address: str) -> None:
    """Ray itself would wait for longer than ten minutes for a cluster that is not there."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _reserve(ray: Any, bundle: dict[str, int], nodes: int, wait: float) -> Any:
    """A placement group, once the cluster has room for it."""
    group = ray.util.placement_group([bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    deadline = time.monotonic() + wait
    patience = _FIRST_WAIT
    while not group.wait(min(patience, max(0.0, deadline - time.monotonic()))):
        missing = _what_is_missing(ray, bundle, nodes)
        if time.monotonic() >= deadline:
            raise LaunchError(
                "no-ray-room",
                f"The Ray cluster had no room within {wait:.0f} s: {missing}.",
                fix="ask for fewer ranks or nodes, wait for other jobs to end, or add machines",
            )
        log.info(f"ray: waiting; {missing}")
        patience = _SAY_EVERY
    return group


def _what_is_missing(ray: Any, bundle: dict[str, int], nodes: int) -> str:
    [(kind, ranks)] = bundle.items()
    sizes = [machine["Resources"].get(kind, 0) for machine in ray.nodes() if machine["Alive"]]
    large = sum(has >= ranks for has in sizes)
    free = ray.available_resources().get(kind, 0)
    return (
        f"asked for: {ranks} {kind}s on each of {nodes} machines; there: {large} of {len(sizes)} machines have "
        f"as many, and {free:g} of all {sum(sizes):g} {kind}s are free"
    )


def _host_names(ray: Any, group: Any, nodes: int) -> list[str]:
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    hosts = {machine["NodeID"]: machine["NodeManagerHostname"] for machine in ray.nodes()}
    return [hosts.get(places[node], f"node {node}") for node in range(nodes)]
