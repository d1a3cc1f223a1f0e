"""Facts about networks, judged; and this machine's own network. tests/system/test_doctor_interfaces.py breaks one."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.launch import DEFAULT_PORT
from paceline.doctor import interfaces
from paceline.doctor.finding import Finding
from paceline.doctor.interfaces import InterfaceFacts, NetworkInterface
from paceline.runtime.network import LOOPBACK, listen

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
