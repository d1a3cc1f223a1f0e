"""Several nodes, each started by a person: the launcher on the first one hosts the coordinator.

    paceline launch --nodes 2 --node-rank 0 --master a:29500 -n 4 train.py     on a
    paceline launch --nodes 2 --node-rank 1 --master a:29500 -n 4 train.py     on b

Ports that a firewall has to let through to the first node: that of --master for the launchers, and the next one for
the store that ranks meet in. Ranks also talk to each other directly, at ports that gloo and NCCL choose.

The coordinator is a process of its own: what it does must not wait for this launcher, which forks ranks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from paceline import log
from paceline.config.launch import Endpoint, LaunchSpec, NodeRange
from paceline.errors import LaunchError
from paceline.launcher.cluster import node_env
from paceline.launcher.cluster.channel import connect, job_token
from paceline.launcher.cluster.coordinator import Coordinator
from paceline.launcher.cluster.fingerprint import Fingerprint, fingerprint
from paceline.launcher.cluster.node import Node
from paceline.launcher.local.rank_env import prepare_environment
from paceline.launcher.local.single_node import launch_single_node
from paceline.launcher.network import LOOPBACK, is_loopback, listen, own_address_of
from paceline.launcher.rank_count import choose_ranks
from paceline.launcher.workload import Workload
from paceline.text import plural

COORDINATOR_LOST = 78  # the exit status


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """One of several launchers that people started."""
    nodes = spec.node_range
    if spec.node_rank is not None and spec.node_rank >= nodes.most:
        raise LaunchError(
            "bad-number",
            f"--node-rank {spec.node_rank} is not one of {plural(nodes.most, 'node')}.",
            fix=f"they count from 0 to {nodes.most - 1}; --nodes says how many there are",
        )
    if nodes.most == 1:
        return launch_single_node(workload, spec)
    if spec.master is None:
        raise LaunchError(
            "no-master",
            "There are several nodes, but no --master that says where they meet.",
            fix="--master HOST:29500 on every node, HOST being the first one's name or address",
        )
    master = Endpoint(spec.master.host, spec.port or spec.master.port)
    return launch_manual(workload, replace(spec, nodes=nodes, master=master))


def launch_from_environment(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """One of several launchers that an operator or a scheduler started. The command line counts more."""
    found = node_env.read_node_environment(os.environ)
    assert found is not None
    log.info(found.words())
    host, port = found.endpoint()
    node_rank = found.node_rank if spec.node_rank is None else spec.node_rank
    wanted = replace(
        spec,
        nodes=spec.nodes or NodeRange(found.nodes_min, found.nodes_max),
        ranks=spec.ranks or found.ranks,
        node_rank=node_rank,
        master=Endpoint(host, spec.port or port),
    )
    return launch_manual(workload, wanted)


def launch_manual(workload: Workload, spec: LaunchSpec) -> int:
    """`spec.master` is where the coordinator is, `spec.node_rank` which node this is; None: any."""
    assert spec.master is not None
    prepare_environment(spec)
    ranks, reason = choose_ranks(spec.ranks, device=spec.device, on_cpu=spec.default_cpu_ranks)
    log.info(f"ranks: {ranks} on this node ({reason})")
    token = job_token()
    listener = _listen(spec.master, spec.node_rank, token)
    # Imported before the fork, so that this is done once; and only now: it reads the environment.
    import paceline.launcher.local.agent  # noqa: F401

    workload.preload()

    address = spec.master
    if listener is not None:
        own = listener.getsockname()[0]
        address = Endpoint(LOOPBACK if own == "0.0.0.0" else own, address.port)
    own_fingerprint = fingerprint(script=workload.script, recipe=workload.recipe)
    is_host = listener is not None
    with nullcontext() if listener is None else _hosted(listener, token, spec, own_fingerprint):
        try:
            return Node(workload, spec, ranks, [address], token, number=spec.node_rank, is_host=is_host).run()
        except LaunchError as error:
            if error.code != "launch.coordinator-lost":
                raise
            print(error, file=sys.stderr, flush=True)  # noqa: T201
            return COORDINATOR_LOST


def _listen(master: Endpoint, node_rank: int | None, token: str) -> socket.socket | None:
    """A socket for the coordinator, where this machine is the one that hosts it."""
    if node_rank is not None and node_rank > 0:
        return None
    own = own_address_of(master.host)
    if own is None and (node_rank is None or _is_hosted(master, token)):
        return None
    # A name of this machine's that means loopback here (as Debian writes into /etc/hosts) is none that others mean; an
    # address that is not ours may lead here through a service or a tunnel.
    everywhere = own is None or (is_loopback(own) and own_address_of(master.host) != master.host)
    try:
        return listen("0.0.0.0" if everywhere and master.host != "localhost" else own or LOOPBACK, master.port)
    except LaunchError:
        if node_rank is None:  # another launcher of this machine was quicker, and hosts it
            return None
        raise


def _is_hosted(master: Endpoint, token: str) -> bool:
    """Whether somebody else is the first node already: then this one learns there that it is one too many."""
    found = connect([master], token)
    if found is not None:
        found.close()
    return found is not None


@contextmanager
def _hosted(listener: socket.socket, token: str, spec: LaunchSpec, wanted: Fingerprint) -> Iterator[None]:
    """The coordinator in a process of its own, until all nodes know how it ended."""
    theirs, ours = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(ours)
            assert spec.master is not None
            store_port = spec.master.port + 1
            _host(Coordinator(listener, token, spec, lambda message: None, wanted, store_port=store_port), theirs)
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    os.close(theirs)
    listener.close()
    try:
        yield
    finally:
        os.close(ours)
        os.waitpid(process, 0)


def _host(coordinator: Coordinator, launcher: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the launcher gets them too, and tells
    while not coordinator.is_over:
        coordinator.step()
        gone, _, _ = select.select([launcher], [], [], 0)
        if gone and coordinator.status is None:
            coordinator.lose(0, "the launcher that hosts the coordinator exited")
            break
    coordinator.close()
