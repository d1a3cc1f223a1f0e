"""Checks what ranks need of this machine's network: loopback, an interface to other hosts, a host name, and ports; and
the state of InfiniBand and RoCE.

Ranks on one machine use loopback only. On several, `paceline launch` uses the interface that reaches the coordinator;
ranks started in another way leave the choice to gloo, which resolves the host name, and to NCCL. NCCL uses all active
InfiniBand ports, or those of NCCL_IB_HCA. RoCE is checked only for several hosts: many Ethernet cards support it
although nobody uses it.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.config.launch import DEFAULT_PORT
from paceline.errors import LaunchError
from paceline.runtime.network import LOOPBACK, address_of, interface_of, is_loopback, is_running, listen, mtu_of
from paceline.text import plural
from paceline.tools.doctor.finding import Finding, graded
from paceline.tools.doctor.limits import text_of

_ELSEWHERE = "198.51.100.1"  # reserved for documentation: the default route leads there
_VIRTUAL = re.compile(r"docker|virbr|veth|br-|cni|flannel|cali|podman|lxc|lxd")
_SLOW = 1000  # Mb/s
_FEW_PORTS = 1000
_EPHEMERAL = ("32768", "60999")  # Linux's default


class NetworkInterface(NamedTuple):
    name: str
    is_up: bool = True
    address: str = ""  # IPv4
    mtu: int = 1500
    speed: int = 0  # Mb/s; 0: unknown


@dataclass(frozen=True)
class InterfaceFacts:
    interfaces: tuple[NetworkInterface, ...] = ()
    loopback_error: str = ""
    route: str | None = None  # name of the interface to the master, or else of the default route
    host: str = ""
    addresses: tuple[str, ...] = ()  # that the host name resolves to
    host_error: str = ""
    listeners: Mapping[int, str] = field(default_factory=dict)  # process by port
    ephemeral: tuple[int, int] = (32768, 60999)
    chosen: str = ""  # GLOO_SOCKET_IFNAME


def read(
    master: str | None = None, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> InterfaceFacts:
    loopback_error = ""
    try:
        listen(LOOPBACK, None).close()
    except LaunchError as error:
        loopback_error = error.what
    host = socket.gethostname()
    addresses, host_error = resolve(host)
    masters = resolve(master)[0] if master else ()
    try:
        low, high = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # not Linux
        low, high = _EPHEMERAL
    return InterfaceFacts(
        tuple(_interfaces(root)), loopback_error, _route([*masters, _ELSEWHERE]), host, addresses, host_error,
        _listeners(root), (int(low), int(high)), environment.get("GLOO_SOCKET_IFNAME", ""),
    )  # fmt: skip


def resolve(name: str, seconds: float = 5.0) -> tuple[tuple[str, ...], str]:
    """The addresses of a name, or why there are none. A name server that does not answer is given up."""
    found: dict[str, None] = {}
    errors = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            found.update((str(each[4][0]), None) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
            errors[0] = ""
        except OSError as error:
            errors[0] = error.strerror or str(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(found), errors[0]


def _interfaces(root: Path) -> Iterator[NetworkInterface]:
    for _, name in socket.if_nameindex():
        speed = 0
        with suppress(OSError, ValueError):  # a virtual one has none, or -1
            speed = int((root / "sys/class/net" / name / "speed").read_text())
        yield NetworkInterface(name, is_running(name), address_of(name), mtu_of(name), max(speed, 0))


def _route(addresses: Iterable[str]) -> str | None:
    for address in addresses:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((address, DEFAULT_PORT))  # sends nothing
            return interface_of(probe.getsockname()[0])
    return None


def _listeners(root: Path) -> dict[int, str]:
    """The process that listens on each TCP port."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # no IPv6
            for line in (root / "proc/net" / table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state == "0A":  # LISTEN
                    sockets[f"socket:[{inode}]"] = int(local.rpartition(":")[2], 16)
    found = dict.fromkeys(sockets.values(), "an unknown process (sudo ss -ltnp)")
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if (target := str(descriptor.readlink())) in sockets:
                        found[sockets[target]] = f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return found


def check(facts: InterfaceFacts, *, port: int | None, several_hosts: bool) -> list[Finding]:
    """`port`: of the coordinator; None: the default."""
    error = facts.loopback_error
    low, high = facts.ephemeral
    are_few = high - low + 1 < _FEW_PORTS
    return [
        graded("loopback", "fail" if error else "ok", error or f"{LOOPBACK} accepts connections"),
        _interface(facts) if several_hosts else Finding("network interface", "ok", "lo: ranks are on one machine"),
        _host_name(facts, several_hosts),
        _port(facts.listeners, port, several_hosts),
        graded("ephemeral ports", "warn" if are_few else "ok", f"{'only ' * are_few}{low} to {high}"),
    ]


def _interface(facts: InterfaceFacts) -> Finding:
    check = "network interface"
    up = [each for each in facts.interfaces if each.is_up and each.address and not is_loopback(each.address)]
    virtual = [f"{each.name} ({each.address})" for each in up if _VIRTUAL.match(each.name)]
    used = next((each for each in up if each.name == (facts.chosen or facts.route)), None)
    if not up:
        return graded(check, "fail", "no interface except loopback is up and has an IPv4 address", "none")
    if used is None and facts.chosen:
        what = f"GLOO_SOCKET_IFNAME={facts.chosen} is not one of {', '.join(each.name for each in up)}"
        return graded(check, "fail", what, "wrong")
    if used is None:
        what = f"no route to other hosts through {', '.join(each.name for each in up)}"
        return graded(check, "warn", what, "no route", name=up[0].name)
    what = f"{used.name} ({used.address}, MTU {used.mtu}{f', {used.speed} Mb/s' * (used.speed > 0)})"
    if 0 < used.speed < _SLOW:
        return graded(check, "warn", what, "slow", name=used.name, seconds=f"{8000 / used.speed:.0f}")
    if virtual and not facts.chosen:
        return graded(check, "warn", f"{what}, and {', '.join(virtual)}", "virtual", name=used.name)
    return Finding(check, "ok", what)


def _host_name(facts: InterfaceFacts, several_hosts: bool) -> Finding:
    what = f"{facts.host} resolves to {', '.join(facts.addresses)}"
    if facts.host_error:
        what = f"{facts.host} does not resolve: {facts.host_error}"
        return graded("host name", "warn", what, host_name=facts.host)
    is_wrong = several_hosts and all(map(is_loopback, facts.addresses)) and not facts.chosen
    case = "loopback with a route" if facts.route else "loopback"
    return graded("host name", "warn" if is_wrong else "ok", what, case, host_name=facts.host, route=facts.route)


def _port(listeners: Mapping[int, str], port: int | None, several_hosts: bool) -> Finding:
    if port is None and not several_hosts:
        return Finding("port", "ok", "ranks on one machine use a free one")
    first = port or DEFAULT_PORT
    ports = (first, first + 1) if several_hosts else (first,)  # of launchers, and of ranks
    taken = [f"{each} is in use by {listeners[each]}" for each in ports if each in listeners]
    if not taken:
        return Finding("port", "ok", f"{' and '.join(map(str, ports))} free")
    return graded("port", "fail", ", ".join(taken), "several hosts" if several_hosts else "", other=first + 100)


_DMA_BUF = (5, 12)  # the first Linux in which ports access GPU memory without a module for it


class FabricPort(NamedTuple):
    name: str  # mlx5_0:1
    state: str  # ACTIVE, DOWN, INIT, …
    physical_state: str  # LinkUp, Polling, Disabled, …
    rate: str  # 400 Gb/sec (4X NDR)
    link_layer: str  # InfiniBand or Ethernet


@dataclass(frozen=True)
class FabricFacts:
    ports: tuple[FabricPort, ...] = ()  # that NCCL_IB_HCA allows
    peer_memory: str = ""  # what lets ports access GPU memory

    @property
    def has_infiniband(self) -> bool:
        return any(port.link_layer == "InfiniBand" and port.state == "ACTIVE" for port in self.ports)


def read_fabric(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> FabricFacts:
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        state, physical, rate, layer = (
            text_of(folder / name) for name in ("state", "phys_state", "rate", "link_layer")
        )
        name = f"{folder.parts[-3]}:{folder.name}"
        if _is_allowed(name, environment.get("NCCL_IB_HCA", "")):
            ports.append(FabricPort(name, state.partition(": ")[2], physical.partition(": ")[2], rate, layer))
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / name).exists()]
    kernel = tuple(map(int, re.findall(r"\d+", text_of(root / "proc/sys/kernel/osrelease"))[:2]))
    if "Open Kernel Module" in text_of(root / "proc/driver/nvidia/version") and kernel >= _DMA_BUF:
        modules.append("DMA-BUF")
    return FabricFacts(tuple(ports), ", ".join(modules))


def _is_allowed(name: str, setting: str) -> bool:
    """NCCL's syntax: `mlx5` is a prefix, `=mlx5_0,mlx5_1:1` are names, `^` excludes."""
    entries = setting.lstrip("^=").split(",")
    is_exact = "=" in setting[:2]
    device = name.partition(":")[0]
    is_listed = any(entry in (name, device) if is_exact else name.startswith(entry) for entry in entries)
    return is_listed != setting.startswith("^")


def check_fabric(facts: FabricFacts, gpus: int, several_hosts: bool) -> list[Finding]:
    infiniband, ethernet = (
        [port for port in facts.ports if port.link_layer == layer] for layer in ("InfiniBand", "Ethernet")
    )
    ports = infiniband or (ethernet if several_hosts else [])
    if not ports:
        return [Finding("InfiniBand", "ok", "none")]
    active = [port for port in ports if port.state == "ACTIVE"]
    findings = [_states("InfiniBand" if infiniband else "RoCE", ports, active, several_hosts)]
    if gpus and active:
        what = facts.peer_memory or "not available: nvidia_peermem is not loaded"
        findings.append(graded("GPUDirect RDMA", "ok" if facts.peer_memory else "warn", what))
    return findings


def _states(name: str, ports: Sequence[FabricPort], active: Sequence[FabricPort], several_hosts: bool) -> Finding:
    down = [port for port in ports if port not in active]
    what = ", ".join(f"{port.name} is {port.state} ({port.physical_state})" for port in down)
    fix = "check the cable and the switch (ibstat)"
    if any(port.state == "INIT" for port in down):
        fix = "start a subnet manager (opensm) in this network"
    if not active and not several_hosts:
        return Finding(name, "ok", f"{what}; not used on one machine")
    if not active:
        return Finding(name, "warn", what, "NCCL falls back to TCP, which is many times slower", fix)
    use = f"export NCCL_IB_HCA='={','.join(port.name for port in active)}'"
    if down:
        return Finding(name, "warn", what, "NCCL uses the others only", f"{fix}; if it is not needed: {use}")
    rates = {port.rate for port in active}
    if len(rates) > 1:
        what = ", ".join(f"{port.name}: {port.rate}" for port in active)
        fix = "check the slower ones (ibstat), or choose ports: export NCCL_IB_HCA"
        return Finding(name, "warn", what, "the slowest port sets the pace", fix)
    return Finding(name, "ok", f"{plural(len(active), 'active port')}, {rates.pop()}")
