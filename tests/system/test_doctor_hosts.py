"""Checks across machines: a real ssh server with two host names, and two network namespaces, each broken in turn."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import forked
from paceline.config.launch import DEFAULT_PORT, Endpoint, LaunchSpec, NodeRange
from paceline.launcher.backends.ssh import read_hosts
from paceline.launcher.dispatch import dispatch
from paceline.launcher.local import agent as _agent  # noqa: F401  # once, before launchers are forked
from paceline.launcher.workload import Workload
from paceline.runtime.environment import TOKEN
from paceline.tools.doctor import node_probe, ssh_hosts
from paceline.tools.doctor.finding import Finding, worst
from paceline.tools.doctor.node_probe import ProbeRequest
from system import namespaces, ssh_server
from system.namespaces import Machine
from system.ssh_server import SshServer

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts an ssh server: set PACELINE_SYSTEM_TESTS=1"
)
SECONDS = 60.0  # generous: an import of torch on a busy machine takes several
_CLONE_NEWUTS = 0x04000000
NO_LOCAL_CHECKS = """
import sys, types
module = sys.modules["paceline.tools.doctor.machine"] = types.ModuleType("paceline.tools.doctor.machine")
module.check_machine = lambda *_, **__: []
"""


# Hosts, over ssh


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server.running(tmp_path_factory.mktemp("ssh")) as server:
        yield server


def check(
    ssh: tuple[str, ...], hosts: str = "node-a,node-b", *, python: str | Path = sys.executable, folder: str = "/"
) -> dict[str, list[Finding]]:
    """By host."""
    findings = ssh_hosts.check(read_hosts(hosts), ssh=ssh, python=str(python), folder=folder, seconds=SECONDS)
    return {host.name: [each for each in findings if each.host == host.name] for host in read_hosts(hosts)}


def only(findings: list[Finding], check: str) -> Finding:
    [finding] = [each for each in findings if each.check == check]
    return finding


def python_on_node_b(folder: Path, modules: dict[str, str]) -> Path:
    return python_on(folder, modules, f"*' {ssh_server.ADDRESSES['node-b']} '*")


def python_on(folder: Path, modules: dict[str, str], connection: str = "*") -> Path:
    """An interpreter that finds these files first, on hosts whose ssh connection is like that."""
    for name, text in modules.items():
        path = folder / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wrapper = folder / "python"
    wrapper.write_text(f"""#!/bin/sh
case "$SSH_CONNECTION" in {connection}) export PYTHONPATH='{folder}/modules' ;; esac
exec '{sys.executable}' "$@"
""")
    wrapper.chmod(0o755)
    return wrapper


def test_two_good_hosts_have_nothing_to_complain_about(server: SshServer, tmp_path: Path) -> None:
    folder = tmp_path / "it's a $(touch canary); folder"
    folder.mkdir()
    found = check(server.ssh, folder=str(folder))
    for findings in found.values():
        assert [each.check for each in findings] == [
            "login", "versions", "working directory", "connection back", "clock"
        ]  # fmt: skip
        assert worst(findings) == "ok"
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.nightly
def test_a_key_that_the_host_does_not_know_is_a_failed_login(server: SshServer, tmp_path: Path) -> None:
    key, config = tmp_path / "key", tmp_path / "config"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    lines = Path(server.ssh[-1]).read_text().splitlines()
    config.write_text("\n".join(f"IdentityFile {key}" if "IdentityFile" in line else line for line in lines) + "\n")
    [finding] = check(("ssh", "-F", str(config)))["node-a"]
    assert (finding.check, finding.status) == ("login", "fail")
    assert "Permission denied" in finding.what
    assert "ssh-copy-id node-a" in finding.fix


@pytest.mark.nightly
def test_a_host_without_ssh_server_is_a_failed_login(server: SshServer) -> None:
    found = check((*server.ssh, "-p", "1"))
    for host in ("node-a", "node-b"):
        [finding] = found[host]
        assert finding.status == "fail" and "Connection refused" in finding.what
        assert "systemctl enable --now ssh" in finding.fix


@pytest.mark.nightly
def test_an_unknown_host_does_not_keep_the_others_from_being_checked(server: SshServer) -> None:
    found = check(server.ssh, "node-a,no-such-host.invalid")
    assert worst(found["node-a"]) == "ok"
    [finding] = found["no-such-host.invalid"]
    assert finding.status == "fail" and "Could not resolve" in finding.what


@pytest.mark.nightly
def test_an_unknown_host_key_is_a_failed_login(server: SshServer) -> None:
    options = ("-o", "StrictHostKeyChecking=yes", "-o", "UserKnownHostsFile=/dev/null")
    [finding] = check((*server.ssh, *options), "node-a")["node-a"]
    assert finding.status == "fail" and finding.what.endswith("Host key verification failed.")
    assert finding.fix.endswith("ssh node-a")


@pytest.mark.nightly
def test_a_changed_host_key_is_a_failed_login(server: SshServer, tmp_path: Path) -> None:
    key = (Path(server.ssh[-1]).parent / "client_key.pub").read_text()  # any but the host's
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {key}")
    options = ("-o", "StrictHostKeyChecking=yes", "-o", f"UserKnownHostsFile={tmp_path}/known_hosts")
    [finding] = check((*server.ssh, *options), "node-a")["node-a"]
    assert finding.status == "fail" and "ssh-keygen -R node-a" in finding.fix


@pytest.mark.nightly
def test_a_host_that_accepts_and_says_nothing_is_given_up(server: SshServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        [finding] = check((*server.ssh, "-p", str(silent.getsockname()[1])), "node-a")["node-a"]
    assert finding.status == "fail" and "timed out" in finding.what
    assert time.monotonic() - began < SECONDS / 2


@pytest.mark.nightly
def test_an_interpreter_without_paceline_is_a_failure_with_the_pip_command(server: SshServer) -> None:
    finding = only(check(server.ssh, "node-a", python="/usr/bin/python3")["node-a"], "versions")
    assert finding.status == "fail"
    assert "and not installed on node-a" in finding.what
    assert "ssh node-a /usr/bin/python3 -m pip install paceline==" in finding.fix


@pytest.mark.nightly
def test_a_missing_interpreter_is_a_failure(server: SshServer) -> None:
    finding = only(check(server.ssh, "node-a", python="/no/such/python")["node-a"], "versions")
    assert finding.status == "fail" and "/no/such/python" in finding.what
    assert "--python" in finding.fix


@pytest.mark.nightly
def test_another_version_of_torch_on_one_host_is_a_failure_with_both_values(server: SshServer, tmp_path: Path) -> None:
    fake = {"torch-1.2.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n"}
    found = check(server.ssh, python=python_on_node_b(tmp_path, fake))
    assert only(found["node-a"], "versions").status == "ok"
    finding = only(found["node-b"], "versions")
    assert finding.status == "fail" and "and 1.2.3 on node-b" in finding.what


@pytest.mark.nightly
def test_a_broken_torch_on_one_host_is_a_failure_with_its_error(server: SshServer, tmp_path: Path) -> None:
    broken = {"torch.py": "raise OSError('libcudart.so.13: cannot open shared object file')"}
    found = check(server.ssh, python=python_on_node_b(tmp_path, broken))
    assert worst(found["node-a"]) == "ok"
    assert "libcudart.so.13" in only(found["node-b"], "imports").what


@pytest.mark.nightly
def test_a_wrong_clock_on_one_host_is_a_failure_with_its_offset(server: SshServer, tmp_path: Path) -> None:
    ahead = {"sitecustomize.py": "import time\nreal = time.time\ntime.time = lambda: real() + 90\n"}
    found = check(server.ssh, python=python_on_node_b(tmp_path, ahead))
    assert only(found["node-a"], "clock").status == "ok"
    finding = only(found["node-b"], "clock")
    assert finding.status == "fail" and "90.0 s ahead of that of this machine" in finding.what


@pytest.mark.nightly
def test_a_folder_that_a_host_does_not_have_is_a_failure(server: SshServer, tmp_path: Path) -> None:
    finding = only(check(server.ssh, "node-a", folder=str(tmp_path / "missing"))["node-a"], "working directory")
    assert finding.status == "fail" and "mkdir -p" in finding.fix


@pytest.mark.nightly
def test_hosts_that_pass_are_probed_over_ssh_by_one_rank_each(server: SshServer, tmp_path: Path) -> None:
    stub = (
        "import sys, types\nmodule = types.ModuleType('paceline.tools.doctor.machine')\n"
        "sys.modules[module.__name__] = module"
    )
    python = python_on(tmp_path, {"sitecustomize.py": f"{stub}\nmodule.check_machine = lambda *_, **__: []\n"})
    spec = node_probe.one_rank_per_node(
        LaunchSpec(hosts="node-a:2,node-b:2", ssh=shlex.join(server.ssh), python=str(python))
    )
    before = Finding("login", "ok", "ssh node-a", host="node-a")
    work = node_probe.workload(ProbeRequest(json=True, device="cpu", findings=(before,)))
    status, said = run_forked(tmp_path, lambda: sys.exit(dispatch(work, spec, [])))
    assert status == 0, said
    report = json.loads(said)
    assert report["findings"][0]["what"] == "ssh node-a"
    assert of(report, "all-reduce")["status"] == "ok"
    assert len(report["links"]) == 2


def run_forked(folder: Path, program: Callable[[], object]) -> tuple[int, str]:
    """The exit status of a program in a process of its own, and its standard output; if that is empty, its errors."""
    with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
        pid = forked.start(program, folder, output.fileno(), errors.fileno())
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:  # the time of the test is over
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    return status, (folder / "output").read_text() or (folder / "errors").read_text()


# Two machines


class Node:
    """A launcher of the probe on one machine, with a host name of its own."""

    def __init__(self, folder: Path, machine: Machine, number: int, master: Machine, env: dict[str, str]) -> None:
        spec = LaunchSpec(
            ranks=1, nodes=NodeRange(2, 2), node_rank=number, master=Endpoint(master.address, DEFAULT_PORT)
        )
        request = ProbeRequest(json=True, device="cpu")
        body = Workload(lambda: node_probe.main(request, lambda: [Finding("disk", "ok", "looked at")]))

        def launch() -> None:
            os.environ.update(env)
            os.environ[TOKEN] = "a secret of the tests"
            machine.enter()
            if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            socket.sethostname(f"node-{'ab'[number]}")
            raise SystemExit(dispatch(body, spec, []))

        self.output, self.errors = folder / f"output-{number}", folder / f"errors-{number}"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self._pid = forked.start(launch, folder, output.fileno(), errors.fileno())
        self._status: int | None = None

    def end(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._status

    def kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            self.end()


Probe = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with namespaces.joined() as both:
        yield both


@pytest.fixture
def probe(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Probe]:
    """Probes both; returns the exit status and the report. `env`: of the second one's launcher."""
    nodes: list[Node] = []

    def run(env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        for number, machine in enumerate(machines):
            nodes.append(Node(tmp_path, machine, number, machines[0], (env or {}) if number else {}))
        status = max(node.end() for node in nodes)
        said = nodes[0].output.read_text()
        assert said, nodes[0].errors.read_text() + nodes[1].errors.read_text()
        return status, json.loads(said)

    yield run
    for node in nodes:
        node.kill()


def of(report: dict[str, Any], check: str) -> dict[str, str]:
    [finding] = [each for each in report["findings"] if each["check"] == check]
    return dict(finding)


def filter_incoming(machine: Machine, rule: str) -> None:
    rules = f"table inet test {{\nchain input {{\ntype filter hook input priority 0;\n{rule}\n}}\n}}\n"
    _inside(machine, "nft", "-f", "-", text=rules)


def _inside(machine: Machine, *command: str, text: str | None = None) -> None:
    argv = ["ip", "netns", "exec", machine.name, *command]
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@pytest.mark.nightly
def test_two_good_machines_have_no_failures_and_two_links(probe: Probe) -> None:
    status, report = probe()
    assert status == 0
    # How fast this machine is at the moment is not tested.
    assert {each["status"] for each in report["findings"] if each["check"] not in ("latency", "bandwidth")} == {"ok"}
    assert [(link["from"], link["to"]) for link in report["links"]] == [("node-a", "node-b"), ("node-b", "node-a")]
    assert of(report, "all-reduce")["what"].startswith("2 nodes, gloo: ")


NEW = "tcp flags & (syn | ack) == syn"  # connections that the other side opens
LAUNCHERS = f"tcp dport {{ {DEFAULT_PORT}, {DEFAULT_PORT + 1} }} accept"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "closed, rule, error",
    [
        (0, f"{LAUNCHERS}\n{NEW} drop", "timed out"),
        (1, f"{NEW} drop", "timed out"),
        (1, f"{NEW} reject with tcp reset", "Connection refused"),
    ],
)
def test_a_firewall_in_one_direction_is_named_with_the_command_that_opens_it(
    machines: tuple[Machine, Machine], probe: Probe, closed: int, rule: str, error: str
) -> None:
    filter_incoming(machines[closed], rule)
    began = time.monotonic()
    status, report = probe()
    assert status == 1
    finding, names = of(report, "connections"), ["node-a", "node-b"]
    here, there = names[1 - closed], names[closed]
    way = f"No connection from {here} ({machines[1 - closed].address}) to {there} ({machines[closed].address}:"
    assert finding["what"].startswith(way) and error in finding["what"]
    assert f"on {there}: sudo ufw allow proto tcp from {machines[1 - closed].address}" in finding["fix"]
    assert [(link["from"], link["to"]) for link in report["links"]] == [(there, here)]
    assert "all-reduce" not in {each["check"] for each in report["findings"]}
    assert time.monotonic() - began < 60


@pytest.mark.nightly
def test_the_command_of_a_finding_opens_the_firewall(machines: tuple[Machine, Machine], probe: Probe) -> None:
    """A machine whose firewall drops what it does not know, with Debian's names of table and chain."""
    here, there = machines
    rules = "table inet filter {\nchain input {\ntype filter hook input priority 0; policy drop;\n"
    rules += "iif lo accept\nct state established,related accept\n}\n}\n"
    _inside(there, "nft", "-f", "-", text=rules)
    fix = ssh_hosts.open_ports(here.address).partition("without ufw: sudo ")[2]
    _inside(there, *fix.split())
    status, report = probe()
    assert status == 0 and of(report, "connections")["status"] == "ok"


def test_a_link_on_which_large_packets_are_lost_points_to_the_mtu(
    machines: tuple[Machine, Machine], probe: Probe
) -> None:
    # Only what is sent to ports that the kernel chose: the launchers are left alone.
    filter_incoming(machines[1], "tcp dport >= 32768 tcp sport >= 32768 meta length > 1400 drop")
    status, report = probe()
    assert status == 1
    finding = of(report, "connections")
    assert finding["what"].startswith("Large messages do not arrive from node-a ")
    assert "MTU" in finding["why"]


@pytest.mark.nightly
def test_a_slow_direction_is_a_warning_that_names_it(machines: tuple[Machine, Machine], probe: Probe) -> None:
    shape = ("rate", "100mbit", "burst", "25000b", "latency", "400ms")
    _inside(machines[0], "tc", "qdisc", "add", "dev", machines[0].interface, "root", "tbf", *shape)
    status, report = probe()
    assert status == 0
    finding = of(report, "bandwidth")
    assert finding["status"] == "warn"
    assert finding["what"].startswith("Slow links: node-a → node-b 0.0")
    speed = {link["from"]: link["gbit_s"] for link in report["links"]}
    assert 0.05 < speed["node-a"] < 0.15 < speed["node-b"]


@pytest.mark.nightly
def test_different_mtus_are_a_warning(machines: tuple[Machine, Machine], probe: Probe) -> None:
    _inside(machines[1], "ip", "link", "set", machines[1].interface, "mtu", "1400")
    status, report = probe()
    assert status == 0
    finding = of(report, "MTU")
    assert (finding["status"], finding["what"]) == ("warn", "node-a: 1500; node-b: 1400")
    assert finding["fix"] == f"on node-a: sudo ip link set dev {machines[0].interface} mtu 1400"


@pytest.mark.nightly
def test_a_backend_that_cannot_connect_is_a_failure_with_its_error(probe: Probe) -> None:
    status, report = probe(env={"GLOO_SOCKET_IFNAME": "no-such-if"})
    assert status == 1
    assert of(report, "connections")["status"] == "ok"
    finding = of(report, "all-reduce")
    assert finding["status"] == "fail" and finding["host"] == "node-b"
    assert "no-such-if" in finding["what"]


@pytest.mark.nightly
def test_a_firewall_on_this_machine_is_found_before_anything_is_launched(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """A host that can be logged in to, and whose connections to this machine are dropped."""
    here, there = machines
    filter_incoming(here, f"{NEW} drop")
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    with ssh_server.running(tmp_path) as server:
        # It reads from a pipe, so that no network is needed.
        command = f"ip netns exec {there.name} {sshd} -i -f {tmp_path}/server_config"
        ssh = (*server.ssh, "-o", f"ProxyCommand={command}")

        def run() -> None:
            here.enter()
            found = ssh_hosts.check(
                read_hosts("node-a"), ssh=ssh, python=sys.executable, folder="/", address=here.address, seconds=SECONDS
            )
            print(json.dumps([each.to_json() for each in found]))

        status, said = run_forked(tmp_path, run)
    assert status == 0, said
    findings = [Finding(**each) for each in json.loads(said)]
    finding = only(findings, "connection back")
    assert finding.status == "fail"
    assert f"{here.address}:" in finding.what and "timed out" in finding.what
    assert "sudo ufw allow proto tcp" in finding.fix
