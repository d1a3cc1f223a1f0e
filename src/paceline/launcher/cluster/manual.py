"""Launches on several nodes with one command on each; the launcher on the first node hosts the coordinator.

    paceline launch --nodes 2 --node-rank 0 --master a:29500 -n 4 train.py     on a
    paceline launch --nodes 2 --node-rank 1 --master a:29500 -n 4 train.py     on b

The first node must be reachable on the port of --master (launchers) and on the next one (the store of the ranks). Ranks
also connect to each other directly, on ports chosen by gloo and NCCL.

The coordinator runs in its own process, so that it does not wait for this launcher, which forks ranks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

from paceline import log
from paceline.config.launch import Endpoint, LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.cluster import node_env
from paceline.launcher.cluster.channel import connect, job_token
from paceline.launcher.cluster.coordinator import Coordinator
from paceline.launcher.cluster.fingerprint import Fingerprint, fingerprint
from paceline.launcher.cluster.node import Node
from paceline.launcher.local.single_node import launch_single_node
from paceline.launcher.local.start import prepare_environment
from paceline.launcher.workload import Workload, choose_ranks
from paceline.runtime.network import LOOPBACK, is_loopback, listen, own_addresses_of, require_known
from paceline.runtime.processes import run_forked, set_title
from paceline.text import plural


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Launch on this node with `--nodes`, `--node-rank` and `--master`."""
    nodes = spec.node_range
    if spec.node_rank is not None and spec.node_rank >= nodes.most:
        raise LaunchError(
            "bad-number",
            f"Invalid value for --node-rank: {spec.node_rank}. The job has {plural(nodes.most, 'node')}.",
            fix=f"use a number from 0 to {nodes.most - 1}, or increase --nodes",
        )
    if nodes.most == 1:
        return launch_single_node(workload, spec)
    if spec.master is None:
        raise LaunchError(
            "no-master",
            "--nodes requires --master.",
            fix="pass --master HOST:29500 on every node, where HOST is the name or address of the first node",
        )
    master = Endpoint(spec.master.host, spec.port or spec.master.port)
    return launch_manual(workload, replace(spec, nodes=nodes, master=master))


def launch_from_environment(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Launch on this node with the settings of a scheduler or operator. The command line takes precedence."""
    found = node_env.read_node_environment(os.environ)
    assert found is not None
    log.info(found.describe())
    host, port = found.endpoint()
    node_rank = found.node_rank if spec.node_rank is None else spec.node_rank
    wanted = replace(
        spec,
        nodes=spec.nodes or found.nodes,
        ranks=spec.ranks or found.ranks,
        node_rank=node_rank,
        master=Endpoint(host, spec.port or port),
    )
    return launch_manual(workload, wanted)


def launch_manual(workload: Workload, spec: LaunchSpec) -> int:
    """`spec.master` is the address of the coordinator; `spec.node_rank` None: assigned by the coordinator."""
    assert spec.master is not None
    prepare_environment(spec)
    ranks, reason = choose_ranks(spec.ranks, device=spec.device, on_cpu=spec.default_cpu_ranks)
    if spec.dry_run:
        node = "a node" if spec.node_rank is None else f"node {spec.node_rank}"
        at = ":".join(map(str, spec.master))
        print(f"would start {ranks} ranks ({reason}) as {node} of {spec.nodes}, with the coordinator at {at}")  # noqa: T201
        return 0
    require_known(spec.master.host)
    log.info(f"ranks: {ranks} on this node ({reason})")
    token = job_token()
    listener = _listen(spec.master, spec.node_rank, token)
    # Imported once, before forking, and after the environment is complete, which torch reads.
    import paceline.launcher.local.agent  # noqa: F401

    workload.preload()

    address = spec.master
    if listener is not None:
        own = listener.getsockname()[0]
        address = Endpoint(LOOPBACK if own == "0.0.0.0" else own, address.port)
    own_fingerprint = fingerprint(script=workload.script, recipe=workload.recipe)
    is_host = listener is not None
    with nullcontext() if listener is None else _hosted(listener, token, spec, own_fingerprint):
        return Node(workload, spec, ranks, [address], token, number=spec.node_rank, is_host=is_host).run()


def _listen(master: Endpoint, node_rank: int | None, token: str) -> socket.socket | None:
    """A socket for the coordinator, if this launcher hosts it."""
    if node_rank is not None and node_rank > 0:
        return None
    own = next(iter(own_addresses_of(master.host)), None)
    if own is None and (node_rank is None or _is_hosted(master, token)):
        return None
    # A name that resolves to loopback here (Debian, in /etc/hosts) resolves to another address elsewhere; an address of
    # another machine may lead here through a service or a tunnel.
    everywhere = own is None or (is_loopback(own) and own != master.host)
    try:
        return listen("0.0.0.0" if everywhere and master.host != "localhost" else own or LOOPBACK, master.port)
    except LaunchError:
        if node_rank is None:  # another launcher on this machine hosts it
            return None
        raise


def _is_hosted(master: Endpoint, token: str) -> bool:
    """Whether another launcher hosts the coordinator; it then rejects this one."""
    found = connect([master], token)
    if found is not None:
        found.close()
    return found is not None


@contextmanager
def _hosted(listener: socket.socket, token: str, spec: LaunchSpec, wanted: Fingerprint) -> Iterator[None]:
    """Run the coordinator in its own process, until all nodes know how the job ended."""
    theirs, ours = os.pipe()

    def host() -> None:
        set_title("paceline: coordinator", "pl-coordinator")
        os.close(ours)
        assert spec.master is not None
        store_port = spec.master.port + 1
        _host(Coordinator(listener, token, spec, lambda message: None, wanted, store_port=store_port), theirs)

    process = run_forked(host)
    os.close(theirs)
    listener.close()
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            os.write(ours, b".")  # closing it is not enough: forked processes hold copies
        os.close(ours)
        os.waitpid(process, 0)


def _host(coordinator: Coordinator, launcher: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the launcher receives them too, and reports them
    while not coordinator.is_over:
        coordinator.step()
        gone, _, _ = select.select([launcher], [], [], 0)
        if gone and coordinator.status is None:
            coordinator.lose(0, "the launcher that hosts the coordinator exited")
            break
    coordinator.close()
