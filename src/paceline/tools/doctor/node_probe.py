"""What one rank per node runs in `paceline doctor --hosts a,b`: `python -m paceline.tools.doctor.node_probe REQUEST`.

    facts        every node checks itself, and publishes its facts in the store of the launcher
    connections  all at once, every node tries to connect to its peers
    links        one node after the other measures the links to its peers
    all-reduce   all together, unless it is clear that it would fail
    report       the first node judges, and reports

The first node reports, so that it works with every launch backend, as in bench/comm_rank.py.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from time import perf_counter
from typing import Any

from pydantic import TypeAdapter

from paceline.config.launch import LaunchSpec
from paceline.errors import PacelineError
from paceline.launcher.backends.ssh import read_hosts
from paceline.launcher.cluster.fingerprint import fingerprint
from paceline.launcher.workload import Target, Workload
from paceline.runtime import environment
from paceline.runtime.network import LOOPBACK, address_of, interface_of, listen, mtu_of
from paceline.tools.doctor import links
from paceline.tools.doctor.finding import Finding, describe, to_json, worst

LocalChecks = Callable[[], list[Finding]]

_STORE_SECONDS = 10.0  # to connect to the store
_CHECK_SECONDS = 120.0  # for the local checks of a node
_SPARE_SECONDS = 10.0  # for a slow machine, on top of what a step takes
_ALL_PAIRS = 4  # nodes up to which every pair is measured


@dataclass(frozen=True)
class ProbeRequest:
    """`ranks`: that training would start on each node. `findings`: of checks before the launch, for the report."""

    json: bool = False
    ranks: int | None = None
    device: str | int | None = None
    backend: str | None = None
    findings: tuple[Finding, ...] = ()

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ProbeRequest:
        return TypeAdapter(cls).validate_json(text)


def workload(request: ProbeRequest) -> Workload:
    """For `dispatch`, with the spec of `one_rank_per_node`."""

    target = Target("module", "paceline.tools.doctor.node_probe", (request.to_text(),))  # for other nodes
    return Workload(lambda: main(request), "paceline.runtime.process_group", target=target, name="paceline doctor")


def one_rank_per_node(spec: LaunchSpec) -> LaunchSpec:
    def entry(name: str) -> str:
        user, at, machine = name.rpartition("@")
        return f"{user}{at}[{machine}]:1" if ":" in machine else f"{name}:1"

    hosts = spec.hosts and ",".join(entry(host.name) for host in read_hosts(spec.hosts))
    return replace(spec, ranks=1, hosts=hosts, run=None)


def main(request: ProbeRequest, local_checks: LocalChecks | None = None) -> None:
    """`local_checks`: by default, those of `doctor/machine.py`."""
    board = NodeBoard()
    if board.node == 0:
        board.publish("token", secrets.token_hex(links.TOKEN_BYTES))
    token = bytes.fromhex(board.read("token", 0, _STORE_SECONDS))
    address = own_address()
    with closing(links.LinkServer(listen(address, None), token)) as server:
        findings = (local_checks or _machine_checks(request, board.nodes))()
        board.publish("facts", asdict(node_facts(address, server.port, request.device, findings)))
        nodes = [links.NodeFacts(**each) for each in board.gather("facts", _CHECK_SECONDS)]
        measured = _measure(board, nodes, token)
    is_first = board.node == 0
    found = [*links.judge_nodes(nodes), *links.judge_links(nodes, measured)]
    if is_first:
        board.publish("continues", board.nodes > 1 and worst(found) != "fail")
    if board.read("continues", 0, _SPARE_SECONDS):
        own = all_reduce(request.device, request.backend)
        board.publish("all-reduce", asdict(own))
        if own.is_stuck and not is_first:
            os._exit(0)  # the thread would keep the process group from closing
        if is_first:
            results = board.gather("all-reduce", ALL_REDUCE_SECONDS + _SPARE_SECONDS)
            found.append(judge_all_reduce(links.names_of(nodes), [AllReduceResult(**each) for each in results]))
    if is_first:
        _report(request, nodes, measured, found)


def _machine_checks(request: ProbeRequest, nodes: int) -> LocalChecks:
    from paceline.tools.doctor import gpus, machine

    user = users_environment()
    return lambda: machine.check_machine(
        gpus.read(environment=user), ranks=request.ranks, several_hosts=nodes > 1, environment=user
    )


class NodeBoard:
    """Where the nodes publish JSON for each other: the store of the launcher. Ranks are nodes, as each has one."""

    def __init__(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        info = environment.read_rank_info() or environment.RankInfo()
        self.node, self.nodes = info.rank, info.world
        host, port = environment.rendezvous_endpoint() or (LOOPBACK, 0)
        limit = timedelta(seconds=_STORE_SECONDS)
        self._store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)

    def publish(self, name: str, value: Any) -> None:
        self._store.set(f"paceline/doctor/{name}/{self.node}", json.dumps(value))

    def read(self, name: str, node: int, seconds: float) -> Any:
        """What a node has published, or will within so many seconds."""
        key = f"paceline/doctor/{name}/{node}"
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.1)))
        except RuntimeError:  # of torch
            raise TimeoutError(f"Node {node} has not answered in time (waited for: {name}).") from None
        return json.loads(self._store.get(key))

    def gather(self, name: str, seconds: float) -> list[Any]:
        """Of all nodes."""
        deadline = time.monotonic() + seconds
        return [self.read(name, node, deadline - time.monotonic()) for node in range(self.nodes)]


def peers_of(node: int, nodes: int) -> list[int]:
    """The nodes to which a node connects: all of a few; of many, its neighbours in a ring and the first one. Each link
    is measured in both directions."""
    if nodes <= _ALL_PAIRS:
        return [each for each in range(nodes) if each != node]
    ring = {(node - 1) % nodes, (node + 1) % nodes, 0}
    return sorted(set(range(nodes)) - {0}) if node == 0 else sorted(ring - {node})


def _measure(board: NodeBoard, nodes: Sequence[links.NodeFacts], token: bytes) -> list[links.Link]:
    """The links of all nodes, measured one after the other, so that they do not compete."""
    peers = peers_of(board.node, board.nodes)

    def connect(peer: int) -> str:
        return _error_of(lambda: links.ping((nodes[peer].address, nodes[peer].port), token))

    with ThreadPoolExecutor(max(1, len(peers))) as pool:  # a firewall that drops packets costs its timeout once
        errors = dict(zip(peers, pool.map(connect, peers), strict=True))
    board.publish("connected", True)
    board.gather("connected", 2 * links.CONNECT_SECONDS + _SPARE_SECONDS)
    before = sum(len(peers_of(node, board.nodes)) for node in range(board.node))
    if board.node:
        board.read("links", board.node - 1, before * links.LINK_SECONDS + _SPARE_SECONDS)
    own = [_measure_link(board.node, peer, nodes[peer], token, errors[peer]) for peer in peers]
    board.publish("links", [asdict(link) for link in own])
    number = sum(len(peers_of(node, board.nodes)) for node in range(board.nodes))
    everything = board.gather("links", number * links.LINK_SECONDS + _SPARE_SECONDS)
    return TypeAdapter(list[links.Link]).validate_python([each for of_node in everything for each in of_node])


def _measure_link(source: int, target: int, there: links.NodeFacts, token: bytes, error: str) -> links.Link:
    if error:
        return links.Link(source, target, error=error, is_open=False)
    times: list[links.LinkTimes] = []
    error = _error_of(lambda: times.append(links.measure((there.address, there.port), token)))
    return links.Link(source, target, times[0] if times else None, error)


def _error_of(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _report(
    request: ProbeRequest, nodes: Sequence[links.NodeFacts], measured: Sequence[links.Link], found: list[Finding]
) -> None:
    names = links.names_of(nodes)
    local = [
        replace(Finding(**each), host=name)  # type: ignore[arg-type]
        for name, node in zip(names, nodes, strict=True)
        for each in node.findings
    ]
    findings = [*request.findings, *local, *found]
    table = [
        {"from": names[link.source], "to": names[link.target], "latency_us": round(link.times.latency * 1e6, 1),
         "gbit_s": round(link.times.bandwidth / 1e9, 3)}
        for link in measured if link.times is not None
    ]  # fmt: skip
    text = to_json(findings, links=table) if request.json else describe(findings)
    print(text, flush=True)  # noqa: T201
    if worst(findings) == "fail":
        raise SystemExit(1)


if __name__ == "__main__":
    main(ProbeRequest.from_text(sys.argv[1]))


_GLOO_INTERFACE = next(iter(environment.interfaces("")))  # the name of the variable


def own_address() -> str:
    """Of the interface that the launcher or the user chose for the ranks, else the one that leads to the store."""
    return address_of(os.environ.get(_GLOO_INTERFACE, "")) or _address_to_store()


def users_environment() -> dict[str, str]:
    """The environment without the network interface that the launcher chose: the one that leads to the store."""
    own = environment.interfaces(_interface_of(_address_to_store()))
    return {name: value for name, value in os.environ.items() if own.get(name) != value}


def _address_to_store() -> str:
    host, port = environment.rendezvous_endpoint() or (LOOPBACK, 1)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    return (interface_of(address) if ":" not in address else None) or ""


def node_facts(address: str, port: int, device: str | int | None, findings: Sequence[Finding]) -> links.NodeFacts:
    """`findings`: of the checks of this machine. `device`: None if GPUs are used where there are any."""
    interface = _interface_of(address)
    return links.NodeFacts(
        host=socket.gethostname(),
        address=address,
        port=port,
        interface=interface,
        mtu=mtu_of(interface),
        versions=fingerprint(script=None, recipe=None)["version"],
        gpus=[] if device == "cpu" else _gpus(),
        findings=[finding.to_json() for finding in findings],
    )


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


ALL_REDUCE_SECONDS = 60.0  # for everything; the first use of a GPU takes some of them
_CONNECT_SECONDS = 20.0
_SMALL, _LARGE = 1, 4 << 20  # numbers of 4 bytes


@dataclass(frozen=True)
class AllReduceResult:
    """On one node. `error`: why there are no times."""

    backend: str = ""
    small: float = 0.0  # seconds for one number
    large: float = 0.0  # for 16 MiB
    error: str = ""
    took: float = 0.0  # seconds until the error
    is_stuck: bool = False  # whether it still waits, in a thread


def all_reduce(device: str | int | None, backend: str | None, seconds: float = ALL_REDUCE_SECONDS) -> AllReduceResult:
    """Collective: must be called on every rank. NCCL may block for half an hour: it runs in a thread, with a limit."""
    done: list[AllReduceResult] = []
    thread = threading.Thread(target=lambda: done.append(_run(device, backend)), daemon=True)
    thread.start()
    thread.join(seconds)
    late = AllReduceResult(error=f"it did not end within {seconds:g} s", took=seconds, is_stuck=True)
    return done[0] if done else late


def _run(device: str | int | None, backend: str | None) -> AllReduceResult:
    import torch
    import torch.distributed as torch_dist

    from paceline.runtime import process_group

    def timed(numbers: int, calls: int) -> float:
        seconds = []
        for _ in range(calls):
            tensor = torch.ones(numbers, device=world.device)
            began = perf_counter()
            torch_dist.all_reduce(tensor)
            total = float(tensor[-1])  # waits for a GPU
            seconds.append(perf_counter() - began)
            if total != world.size:
                raise RuntimeError(f"wrong sum: {total:g} instead of {world.size}")
        return min(seconds[1:])  # the first one connects

    started = perf_counter()
    try:
        world = process_group.init_world(device=device, backend=backend, timeout=_CONNECT_SECONDS)
        if world.size == 1:
            process_group.init_single(world.device)
        process_group.shorten_timeout(ALL_REDUCE_SECONDS)
        result = AllReduceResult(torch_dist.get_backend(), timed(_SMALL, 5), timed(_LARGE, 2))
        process_group.destroy()
    except Exception as error:
        text = error.what if isinstance(error, PacelineError) else str(error) or type(error).__name__
        return AllReduceResult(error=text, took=perf_counter() - started)
    return result


def judge_all_reduce(names: list[str], results: list[AllReduceResult], *, of: str = "") -> Finding:
    """From the results of all nodes; `of`: what took part, if not these."""
    failed = [(result.took, name, result.error) for name, result in zip(names, results, strict=True) if result.error]
    if failed:
        _, name, error = min(failed)  # the others fail later, because they wait for this one
        fix = "run again with NCCL_DEBUG=INFO (TORCH_DISTRIBUTED_DEBUG=DETAIL for gloo), and check --interface"
        first = f"An all-reduce of {of} fails" if of else f"An all-reduce fails first on {name}"
        return Finding("all-reduce", "fail", f"{first}: {error}", "", fix, "" if of else name)
    small, large = (max(getattr(each, size) for each in results) for size in ("small", "large"))
    times = f"{links.format_ms(small)} for one number, {links.format_ms(large)} for 16 MiB"
    return Finding("all-reduce", "ok", f"{of or f'{len(names)} nodes'}, {results[0].backend}: {times}")
