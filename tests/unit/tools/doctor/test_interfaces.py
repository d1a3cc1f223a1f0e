"""Facts about networks, judged; and this machine's own network. tests/system/test_doctor_interfaces.py breaks one."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.launch import DEFAULT_PORT
from paceline.runtime.network import LOOPBACK, listen
from paceline.tools.doctor import interfaces
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.interfaces import InterfaceFacts, NetworkInterface

LO = NetworkInterface("lo", address="127.0.0.1", mtu=65536)
ETH0 = NetworkInterface("eth0", address="10.0.0.1", speed=25000)
DOCKER = NetworkInterface("docker0", address="172.17.0.1")
HEALTHY = InterfaceFacts((LO, ETH0), route="eth0", host="node0", addresses=("10.0.0.1",))


def judged(facts: InterfaceFacts, port: int | None = None, several_hosts: bool = True) -> dict[str, Finding]:
    return {each.check: each for each in interfaces.check(facts, port=port, several_hosts=several_hosts)}


def bad(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: each.status for name, each in findings.items() if each.status != "ok"}


def test_a_healthy_network_is_described() -> None:
    found = judged(HEALTHY)
    assert bad(found) == {}
    assert found["network interface"].what == "eth0 (10.0.0.1, MTU 1500, 25000 Mb/s)"
    assert found["port"].what == f"{DEFAULT_PORT} and {DEFAULT_PORT + 1} free"


def test_this_machine_is_fine_alone() -> None:
    facts = interfaces.read(environment={})
    assert bad(judged(facts, several_hosts=False)) == {}
    (loopback,) = (each for each in facts.interfaces if each.name == "lo")
    assert loopback.is_up and loopback.address == LOOPBACK
    assert loopback.mtu == int(Path("/sys/class/net/lo/mtu").read_text())
    assert facts.host == socket.gethostname()


def test_the_interface_to_the_master_is_found() -> None:
    assert interfaces.read(master=LOOPBACK).route == "lo"


def test_the_speed_of_an_interface_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "proc/sys/net/ipv4/ip_local_port_range").write_text("32768\t60999\n")
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    for text, speed in (("100000\n", 100000), ("-1\n", 0)):
        (tmp_path / "sys/class/net/lo/speed").write_text(text)
        (loopback,) = (each for each in interfaces.read(root=tmp_path).interfaces if each.name == "lo")
        assert loopback.speed == speed


def test_a_port_in_use_is_a_failure_that_names_the_process() -> None:
    with listen(LOOPBACK, None) as listener:
        port = listener.getsockname()[1]
        found = judged(interfaces.read(), port, several_hosts=False)["port"]
    assert found.status == "fail"
    name = Path("/proc/self/comm").read_text().strip()
    assert found.what == f"{port} is in use by {name} (pid {os.getpid()})"
    assert judged(interfaces.read(), port, several_hosts=False)["port"].status == "ok"


def test_the_port_of_the_ranks_is_the_next_one_and_matters_with_several_hosts() -> None:
    taken = replace(HEALTHY, listeners={DEFAULT_PORT + 1: "python (pid 42)"})
    found = judged(taken)
    assert bad(found) == {"port": "fail"} and found["port"].what == f"{DEFAULT_PORT + 1} is in use by python (pid 42)"
    assert f"--master HOST:{DEFAULT_PORT + 100}" in found["port"].fix
    assert bad(judged(taken, several_hosts=False)) == {}
    assert bad(judged(taken, port=DEFAULT_PORT, several_hosts=False)) == {}
    assert bad(judged(taken, port=DEFAULT_PORT + 1, several_hosts=False)) == {"port": "fail"}


def test_a_port_on_all_addresses_of_ipv6_is_in_use() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        assert listener.getsockname()[1] in interfaces.read().listeners


def test_loopback_that_cannot_be_used_is_a_failure() -> None:
    found = judged(replace(HEALTHY, loopback_error="A port on loopback cannot be opened"), several_hosts=False)
    assert bad(found) == {"loopback": "fail"} and found["loopback"].fix == "sudo ip link set lo up"


def test_no_interface_to_other_hosts_is_a_failure_only_with_several() -> None:
    alone = replace(HEALTHY, interfaces=(LO, ETH0._replace(is_up=False)), route=None)
    assert bad(judged(alone)) == {"network interface": "fail"}
    assert bad(judged(alone, several_hosts=False)) == {}


def test_interfaces_without_a_route_are_a_warning_with_the_option() -> None:
    found = judged(replace(HEALTHY, route=None))
    assert bad(found) == {"network interface": "warn"}
    assert found["network interface"].fix == "pass --interface eth0"


def test_a_slow_interface_is_a_warning_with_its_consequence() -> None:
    found = judged(replace(HEALTHY, interfaces=(LO, ETH0._replace(speed=100))))
    assert bad(found) == {"network interface": "warn"}
    assert found["network interface"].why == "1 GB of gradients takes 80 s"


@pytest.mark.parametrize("name", ["docker0", "virbr0", "veth1a2b", "br-0123456789ab", "cni0"])
def test_an_interface_for_containers_is_a_warning_with_several_hosts_until_one_is_chosen(name: str) -> None:
    both = replace(HEALTHY, interfaces=(LO, DOCKER._replace(name=name), ETH0))
    found = judged(both)
    assert bad(found) == {"network interface": "warn"}
    assert found["network interface"].fix == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    assert f"{name} (172.17.0.1)" in found["network interface"].what
    assert bad(judged(both, several_hosts=False)) == {}
    assert bad(judged(replace(both, chosen="eth0"))) == {}
    assert bad(judged(replace(both, interfaces=(LO, DOCKER._replace(is_up=False), ETH0)))) == {}


def test_a_chosen_interface_that_does_not_exist_is_a_failure() -> None:
    found = judged(replace(HEALTHY, chosen="ib0"))
    assert bad(found) == {"network interface": "fail"}
    assert found["network interface"].what == "GLOO_SOCKET_IFNAME=ib0 is not one of eth0"


def test_a_host_name_that_resolves_to_loopback_is_a_warning_with_several_hosts() -> None:
    debian = replace(HEALTHY, addresses=("127.0.1.1",))
    found = judged(debian)
    assert bad(found) == {"host name": "warn"}
    assert "GLOO_SOCKET_IFNAME=eth0" in found["host name"].fix and "/etc/hosts" in found["host name"].fix
    assert bad(judged(debian, several_hosts=False)) == {}
    assert bad(judged(replace(debian, addresses=("127.0.1.1", "10.0.0.1")))) == {}
    assert bad(judged(replace(debian, chosen="eth0"))) == {}


def test_a_host_name_that_does_not_resolve_is_a_warning() -> None:
    addresses, error = interfaces.resolve("no-such-host.invalid")
    assert addresses == () and error
    found = judged(replace(HEALTHY, addresses=(), host_error=error), several_hosts=False)
    assert bad(found) == {"host name": "warn"} and error in found["host name"].what


def test_a_name_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait() and [])
    try:
        assert interfaces.resolve("node0", seconds=0.05) == ((), "no answer within 0.05 s")
    finally:
        answer.set()


def test_few_ephemeral_ports_are_a_warning() -> None:
    assert bad(judged(replace(HEALTHY, ephemeral=(40000, 40998)))) == {"ephemeral ports": "warn"}
    assert bad(judged(replace(HEALTHY, ephemeral=(40000, 40999)))) == {}


NDR, HDR, ROCE = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)", "100 Gb/sec (4X EDR)"
UP, DOWN, INIT = ("4: ACTIVE", "5: LinkUp"), ("1: DOWN", "3: Disabled"), ("2: INIT", "5: LinkUp")
POLLING = ("1: DOWN", "2: Polling")
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 23\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def port(root: Path, device: str, state: tuple[str, str] = UP, rate: str = NDR, layer: str = "InfiniBand") -> None:
    for name, text in (("state", state[0]), ("phys_state", state[1]), ("rate", rate), ("link_layer", layer)):
        write(root, f"sys/class/infiniband/{device}/ports/1/{name}", f"{text}\n")


def judged_fabric(root: Path, gpus: int = 0, several_hosts: bool = True, hca: str = "") -> dict[str, Finding]:
    facts = interfaces.read_fabric(root, {"NCCL_IB_HCA": hca})
    return {each.check: each for each in interfaces.check_fabric(facts, gpus, several_hosts)}


def test_a_machine_without_devices_is_fine(tmp_path: Path) -> None:
    assert judged_fabric(tmp_path, gpus=8) == {"InfiniBand": Finding("InfiniBand", "ok", "none")}
    assert all(each.status == "ok" for each in interfaces.check_fabric(interfaces.read_fabric(), 0, False))


def test_active_ports_of_the_same_rate_are_fine(tmp_path: Path) -> None:
    for number in range(8):
        port(tmp_path, f"mlx5_{number}")
    port(tmp_path, "mlx5_8", DOWN, ROCE, "Ethernet")  # of the management network
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    found = judged_fabric(tmp_path, gpus=8)
    assert found["InfiniBand"] == Finding("InfiniBand", "ok", f"8 active ports, {NDR}")
    assert found["GPUDirect RDMA"] == Finding("GPUDirect RDMA", "ok", "nvidia_peermem")


def test_a_port_that_is_down_beside_active_ones_is_a_warning_until_it_is_excluded(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", POLLING)
    found = judged_fabric(tmp_path)["InfiniBand"]
    assert (found.status, found.what) == ("warn", "mlx5_1:1 is DOWN (Polling)")
    assert found.fix.endswith("export NCCL_IB_HCA='=mlx5_0:1'")
    assert judged_fabric(tmp_path, hca="=mlx5_0:1")["InfiniBand"].status == "ok"


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_only_ports_that_are_down_are_a_warning_with_several_hosts(tmp_path: Path, layer: str) -> None:
    port(tmp_path, "mlx5_0", POLLING, layer=layer)
    port(tmp_path, "mlx5_1", POLLING, layer=layer)
    (found,) = judged_fabric(tmp_path, gpus=8).values()
    assert found.status == "warn" and found.what.startswith("mlx5_0:1 is DOWN (Polling), mlx5_1:1")
    assert all(each.status == "ok" for each in judged_fabric(tmp_path, gpus=8, several_hosts=False).values())


def test_a_port_that_waits_for_a_subnet_manager_says_so(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", INIT)
    found = judged_fabric(tmp_path)["InfiniBand"]
    assert found.status == "warn" and "subnet manager" in found.fix


def test_different_rates_are_a_warning_but_not_between_infiniband_and_ethernet(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", rate=ROCE, layer="Ethernet")
    assert judged_fabric(tmp_path)["InfiniBand"].status == "ok"
    port(tmp_path, "mlx5_2", rate=HDR)
    found = judged_fabric(tmp_path)["InfiniBand"]
    assert (found.status, found.what) == ("warn", f"mlx5_0:1: {NDR}, mlx5_2:1: {HDR}")
    assert judged_fabric(tmp_path, hca="^=mlx5_2")["InfiniBand"].status == "ok"


def test_ethernet_cards_are_judged_only_with_several_hosts(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", rate=ROCE, layer="Ethernet")
    port(tmp_path, "mlx5_1", DOWN, rate=ROCE, layer="Ethernet")
    assert judged_fabric(tmp_path, gpus=1, several_hosts=False) == {"InfiniBand": Finding("InfiniBand", "ok", "none")}
    assert {name: each.status for name, each in judged_fabric(tmp_path, gpus=1).items()} == {
        "RoCE": "warn",
        "GPUDirect RDMA": "warn",
    }


@pytest.mark.parametrize(
    ("module", "kernel", "status"),
    [(PROPRIETARY, "6.8.0-45-generic", "warn"), (OPEN, "6.8.0-45-generic", "ok"), (OPEN, "4.18.0-553.el8", "warn")],
)
def test_gpu_memory_is_reached_through_peermem_or_by_open_drivers_of_a_new_kernel(
    tmp_path: Path, module: str, kernel: str, status: str
) -> None:
    port(tmp_path, "mlx5_0")
    write(tmp_path, "proc/driver/nvidia/version", module)
    write(tmp_path, "proc/sys/kernel/osrelease", f"{kernel}\n")
    found = judged_fabric(tmp_path, gpus=8, several_hosts=False)["GPUDirect RDMA"]
    assert found.status == status
    assert status == "ok" or found.fix == "sudo modprobe nvidia_peermem"
    assert "GPUDirect RDMA" not in judged_fabric(tmp_path, gpus=0)
    (tmp_path / "sys/module/nv_peer_mem").mkdir(parents=True)
    assert judged_fabric(tmp_path, gpus=8)["GPUDirect RDMA"].status == "ok"


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("", ["mlx5_0:1", "mlx5_1:1", "mlx5_10:1"]),
        ("mlx5", ["mlx5_0:1", "mlx5_1:1", "mlx5_10:1"]),
        ("mlx5_1", ["mlx5_1:1", "mlx5_10:1"]),  # a prefix
        ("=mlx5_1", ["mlx5_1:1"]),
        ("=mlx5_0:1,mlx5_10:1", ["mlx5_0:1", "mlx5_10:1"]),
        ("=mlx5_0:2", []),
        ("^mlx5_1", ["mlx5_0:1"]),
        ("^=mlx5_1", ["mlx5_0:1", "mlx5_10:1"]),
    ],
)
def test_ports_are_selected_as_nccl_does(tmp_path: Path, setting: str, allowed: list[str]) -> None:
    for device in ("mlx5_0", "mlx5_1", "mlx5_10"):
        port(tmp_path, device)
    assert [each.name for each in interfaces.read_fabric(tmp_path, {"NCCL_IB_HCA": setting}).ports] == allowed


def test_devices_of_other_networks_are_not_judged_fabric(tmp_path: Path) -> None:
    port(tmp_path, "rdmap0s6", rate=ROCE, layer="Unspecified")  # EFA
    assert judged_fabric(tmp_path, gpus=8)["InfiniBand"].what == "none"


@pytest.mark.parametrize(("layer", "state", "counts"), [
    ("InfiniBand", UP, True), ("InfiniBand", POLLING, False), ("Ethernet", UP, False),
])  # fmt: skip
def test_only_an_active_port_of_infiniband_makes_a_machine_have_it(
    tmp_path: Path, layer: str, state: tuple[str, str], counts: bool
) -> None:
    port(tmp_path, "mlx5_0", state, layer=layer)
    assert interfaces.read_fabric(tmp_path, {}).has_infiniband is counts
