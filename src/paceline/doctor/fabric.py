"""Checks InfiniBand and RoCE: the state of the ports, and whether they can access GPU memory.

NCCL uses all active ports, or those of NCCL_IB_HCA. RoCE is checked only for several hosts: many Ethernet cards support
it although nobody uses it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.doctor.finding import Finding
from paceline.text import plural

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


def read(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> FabricFacts:
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        state, physical, rate, layer = (_text(folder / name) for name in ("state", "phys_state", "rate", "link_layer"))
        name = f"{folder.parts[-3]}:{folder.name}"
        if _is_allowed(name, environment.get("NCCL_IB_HCA", "")):
            ports.append(FabricPort(name, state.partition(": ")[2], physical.partition(": ")[2], rate, layer))
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / name).exists()]
    kernel = tuple(map(int, re.findall(r"\d+", _text(root / "proc/sys/kernel/osrelease"))[:2]))
    if "Open Kernel Module" in _text(root / "proc/driver/nvidia/version") and kernel >= _DMA_BUF:
        modules.append("DMA-BUF")
    return FabricFacts(tuple(ports), ", ".join(modules))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_allowed(name: str, setting: str) -> bool:
    """NCCL's syntax: `mlx5` is a prefix, `=mlx5_0,mlx5_1:1` are names, `^` excludes."""
    entries = setting.lstrip("^=").split(",")
    is_exact = "=" in setting[:2]
    device = name.partition(":")[0]
    is_listed = any(entry in (name, device) if is_exact else name.startswith(entry) for entry in entries)
    return is_listed != setting.startswith("^")


def check(facts: FabricFacts, gpus: int, several_hosts: bool) -> list[Finding]:
    infiniband, ethernet = (
        [port for port in facts.ports if port.link_layer == layer] for layer in ("InfiniBand", "Ethernet")
    )
    ports = infiniband or (ethernet if several_hosts else [])
    if not ports:
        return [Finding("InfiniBand", "ok", "none")]
    active = [port for port in ports if port.state == "ACTIVE"]
    findings = [_states("InfiniBand" if infiniband else "RoCE", ports, active, several_hosts)]
    if gpus and active:
        why, fix = "data between nodes is copied through host memory", "sudo modprobe nvidia_peermem"
        missing = Finding("GPUDirect RDMA", "warn", "not available: nvidia_peermem is not loaded", why, fix)
        findings.append(Finding("GPUDirect RDMA", "ok", facts.peer_memory) if facts.peer_memory else missing)
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
