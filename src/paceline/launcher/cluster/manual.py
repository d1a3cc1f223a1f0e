"""Several nodes, each started by a person: the launcher on the first one hosts the meeting.

    paceline launch --nodes 2 --node-rank 0 --master a:29500 -n 4 train.py     on a
    paceline launch --nodes 2 --node-rank 1 --master a:29500 -n 4 train.py     on b

Ports that a firewall has to let through to the first node: that of --master for the launchers, and the next one for
the store that ranks meet in. Ranks also talk to each other directly, at ports that gloo and NCCL choose.

The meeting is a process of its own: what it does must not wait for this launcher, which forks ranks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from paceline.errors import LaunchError
from paceline.launcher.cluster.channel import connect, job_token
from paceline.launcher.cluster.coordinator import Coordinator
from paceline.launcher.cluster.fingerprint import Identity, identity
from paceline.launcher.cluster.membership import JobPlan
from paceline.launcher.cluster.node import Node
from paceline.launcher.launch import Launch, prepare_environment
from paceline.launcher.network import LOOPBACK, is_loopback, listen, own_address_of
from paceline.launcher.rank_count import choose_ranks
from paceline.launcher.workload import Workload

COORDINATOR_LOST = 78  # the exit status


@dataclass(frozen=True)
class ManualNode:
    """Where this node is among the others."""

    node: int | None  # None: any number
    host: str  # where the meeting is
    port: int


def launch_manual(work: Workload, launch: Launch, place: ManualNode) -> int:
    prepare_environment(launch)
    ranks, reason = choose_ranks(launch.ranks, device=launch.device, on_cpu=launch.on_cpu)
    print(f"ranks: {ranks} on this node ({reason})", file=sys.stderr, flush=True)
    token = job_token()
    listener = _listen(place, token)
    # Imported before the fork, so that this is done once; and only now: it reads the environment.
    import paceline.launcher.local.agent  # noqa: F401

    work.preload()

    address = (place.host, place.port)
    if listener is not None:
        own = listener.getsockname()[0]
        address = (LOOPBACK if own == "0.0.0.0" else own, place.port)
    plan = JobPlan(*launch.nodes, launch.max_restarts, launch.wait, launch.patience, place.port + 1, launch.restarted)
    own_identity = identity(script=work.script, recipe=work.recipe)
    with nullcontext() if listener is None else _hosted(listener, token, plan, own_identity):
        try:
            return Node(work, launch, ranks, [address], token, number=place.node, is_host=listener is not None).run()
        except LaunchError as error:
            if error.code != "launch.coordinator-lost":
                raise
            print(error, file=sys.stderr, flush=True)
            return COORDINATOR_LOST


def _listen(place: ManualNode, token: str) -> socket.socket | None:
    """A socket for the meeting, where this machine is the one that hosts it."""
    if place.node is not None and place.node > 0:
        return None
    own = own_address_of(place.host)
    if own is None and (place.node is None or _is_hosted(place, token)):
        return None
    # A name of this machine's that means loopback here (as Debian writes into /etc/hosts) is none that others mean; an
    # address that is not ours may lead here through a service or a tunnel.
    everywhere = own is None or (is_loopback(own) and own_address_of(place.host) != place.host)
    try:
        return listen("0.0.0.0" if everywhere and place.host != "localhost" else own or LOOPBACK, place.port)
    except LaunchError:
        if place.node is None:  # another launcher of this machine was quicker, and hosts it
            return None
        raise


def _is_hosted(place: ManualNode, token: str) -> bool:
    """Whether somebody else is the first node already: then this one learns there that it is one too many."""
    found = connect([(place.host, place.port)], token)
    if found is not None:
        found.close()
    return found is not None


@contextmanager
def _hosted(listener: socket.socket, token: str, plan: JobPlan, wanted: Identity) -> Iterator[None]:
    """The meeting in a process of its own, until all nodes know how it ended."""
    theirs, ours = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(ours)
            _host(Coordinator(listener, token, plan, lambda message: None, wanted), theirs)
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


def _host(meeting: Coordinator, launcher: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the launcher gets them too, and tells
    while not meeting.is_over:
        meeting.step()
        gone, _, _ = select.select([launcher], [], [], 0)
        if gone and meeting.status is None:
            meeting.lose(0, "the launcher that hosts the meeting ended")
            break
    meeting.close()
