"""Networks that are really broken, each in a network namespace, as `paceline doctor` reads them there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.config.launch import DEFAULT_PORT
from paceline.tools.doctor.finding import Finding
from system import namespaces
from system.namespaces import Machine

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="makes network namespaces: set PACELINE_SYSTEM_TESTS=1"
)

CODE = """
import json, sys
from paceline.tools.doctor import interfaces
facts = interfaces.read(*sys.argv[1:], environment={})
found = interfaces.check(facts, port=None, several_hosts=True)
print(json.dumps([each.to_json() for each in found]))
"""


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with namespaces.joined() as both:
        yield both


def within(machine: Machine, *command: str, prefix: Sequence[str] = ()) -> str:
    done = subprocess.run(
        [*prefix, "ip", "netns", "exec", machine.name, *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def judged(machine: Machine, *master: str, prefix: Sequence[str] = ()) -> dict[str, Finding]:
    found = json.loads(within(machine, sys.executable, "-c", CODE, *master, prefix=prefix))
    return {each["check"]: Finding(**each) for each in found}


def test_the_interface_that_leads_to_the_master_is_used(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    found = judged(here, there.address)
    assert found["loopback"].status == found["network interface"].status == found["port"].status == "ok"
    assert found["network interface"].what.startswith(f"{here.interface} ({here.address}, MTU 1500")


@pytest.mark.nightly
def test_loopback_that_is_down_is_a_failure(machines: tuple[Machine, Machine]) -> None:
    within(machines[0], "ip", "link", "set", "lo", "down")
    within(machines[0], "ip", "address", "flush", "dev", "lo")
    found = judged(machines[0])["loopback"]
    assert found.status == "fail" and found.fix == "sudo ip link set lo up"
    within(machines[0], "ip", "link", "set", "lo", "up")
    assert judged(machines[0])["loopback"].status == "ok"


@pytest.mark.nightly
def test_an_interface_without_route_and_then_without_cable_is_reported(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines
    found = judged(here)["network interface"]
    assert (found.status, found.fix) == ("warn", f"pass --interface {here.interface}")
    here.cut_off()
    assert judged(here)["network interface"].status == "fail"


@pytest.mark.nightly
def test_a_bridge_for_containers_is_a_warning(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    within(here, "ip", "link", "add", "docker0", "type", "veth", "peer", "name", "container")
    within(here, "ip", "link", "set", "container", "up")
    within(here, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
    assert judged(here, there.address)["network interface"].status == "ok"
    within(here, "ip", "link", "set", "docker0", "up")
    found = judged(here, there.address)["network interface"]
    assert found.status == "warn" and "docker0 (172.17.0.1)" in found.what


@pytest.mark.nightly
def test_the_default_port_in_use_is_a_failure_on_that_machine_only(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    code = (
        f"import socket, sys; s = socket.create_server(('', {DEFAULT_PORT})); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        ["ip", "netns", "exec", here.name, sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "up\n"
            found = judged(here)["port"]
            assert found.status == "fail" and f"{DEFAULT_PORT} is in use by " in found.what
            assert f"(pid {holder.pid})" in found.what
            assert judged(there)["port"].status == "ok"
        finally:
            holder.kill()


@pytest.mark.nightly
def test_few_ephemeral_ports_are_a_warning(machines: tuple[Machine, Machine]) -> None:
    within(machines[0], "sysctl", "-w", "net.ipv4.ip_local_port_range=40000 40099")
    found = judged(machines[0])["ephemeral ports"]
    assert (found.status, found.what) == ("warn", "only 40000 to 40099")


@pytest.mark.nightly
def test_a_host_name_that_etc_hosts_maps_to_loopback_is_a_warning(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    for address, status in (("127.0.1.1", "warn"), (machines[0].address, "ok")):
        hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        # In a mount namespace of its own: nobody else sees this file.
        script = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
        hidden = ["unshare", "-m", "sh", "-c", script, "sh", str(hosts)]
        found = judged(machines[0], prefix=hidden)["host name"]
        assert (found.status, found.what) == (status, f"{socket.gethostname()} resolves to {address}")
