"""The probe of several nodes, as ranks of one launch on this machine. Real ones: tests/system/test_doctor_hosts.py."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import forked
from paceline.config.launch import LaunchSpec
from paceline.launcher.cluster.fingerprint import fingerprint
from paceline.runtime.network import LOOPBACK
from paceline.tools.doctor import node_probe
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.node_probe import (
    AllReduceResult,
    ProbeRequest,
    all_reduce,
    judge_all_reduce,
    node_facts,
    one_rank_per_node,
    own_address,
    peers_of,
    users_environment,
    workload,
)
from worlds import ranks

SCRIPT = """
import os, sys, threading
from paceline.config.launch import LaunchSpec
from paceline.tools.doctor import node_probe
from paceline.tools.doctor.node_probe import AllReduceResult
from paceline.tools.doctor.finding import Finding
from paceline.launcher.dispatch import dispatch
from paceline.launcher.workload import Workload

nodes, request, deed = sys.argv[1:]
def local_checks():
    if deed == "silent" and os.environ["RANK"] == "1":
        threading.Event().wait()
    return [Finding("disk", "fail" if deed == "fail" else "ok", "looked at")]
def body():
    node_probe.main(node_probe.ProbeRequest.from_text(request), local_checks)
if deed == "silent":
    node_probe._CHECK_SECONDS = 1.0
if deed == "stuck":
    node_probe.all_reduce = lambda *_: AllReduceResult(error="it did not end", is_stuck=True)
raise SystemExit(dispatch(Workload(body), LaunchSpec(ranks=int(nodes)), []))
"""


def run(folder: Path, nodes: int, request: ProbeRequest, deed: str = "") -> tuple[int, str, str]:
    script = folder / "probe.py"
    script.write_text(SCRIPT)
    done = forked.script(script, str(nodes), request.to_text(), deed, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def report(folder: Path, nodes: int, deed: str = "") -> tuple[int, dict[str, Any]]:
    before = Finding("login", "ok", "logged in", host="a")
    code, said, errors = run(folder, nodes, ProbeRequest(json=True, device="cpu", findings=(before,)), deed)
    assert said, errors
    return code, json.loads(said)


def test_nodes_that_reach_each_other_are_reported_with_their_links(tmp_path: Path) -> None:
    code, found = report(tmp_path, 3)
    assert code == 0
    checks = [each["check"] for each in found["findings"]]
    assert checks == ["login", *["disk"] * 3, "versions", "GPUs", "MTU", "connections", "latency", "bandwidth", "clock",
                      "all-reduce"]  # fmt: skip
    assert "fail" not in {each["status"] for each in found["findings"]}
    assert len({each["host"] for each in found["findings"] if each["check"] == "disk"}) == 3
    assert len({(link["from"], link["to"]) for link in found["links"]}) == 6
    assert all(link["latency_us"] > 0 and link["gbit_s"] > 0 for link in found["links"])


def test_a_failed_check_of_a_node_is_in_the_report_and_the_exit_status(tmp_path: Path) -> None:
    code, found = report(tmp_path, 2, "fail")
    assert (code, found["status"]) == (1, "fail")
    [reduced] = [each for each in found["findings"] if each["check"] == "all-reduce"]
    assert reduced["status"] == "ok"  # it can be tried all the same


def test_an_all_reduce_that_does_not_end_is_reported_and_leaves_nobody_behind(tmp_path: Path) -> None:
    code, found = report(tmp_path, 2, "stuck")
    assert code == 1
    assert found["findings"][-1]["what"].endswith("it did not end")


def test_a_node_that_does_not_answer_is_named(tmp_path: Path) -> None:
    code, _, errors = run(tmp_path, 2, ProbeRequest(device="cpu"), "silent")
    assert code == 1
    assert "Node 1 has not answered in time (waited for: facts)." in errors


def test_a_single_node_reports_itself(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path, 1, ProbeRequest(device="cpu"))
    assert code == 0
    assert "disk: looked at" in said and "all-reduce" not in said


@pytest.mark.parametrize("nodes", [1, 2, 4, 5, 9])
def test_every_link_is_measured_in_both_directions(nodes: int) -> None:
    links = {(node, peer) for node in range(nodes) for peer in peers_of(node, nodes)}
    assert {(peer, node) for node, peer in links} == links
    assert all(node != peer for node, peer in links)
    assert nodes == 1 or {peer for _, peer in links} == set(range(nodes))


def test_a_few_nodes_connect_to_all_and_many_to_their_neighbours_and_the_first() -> None:
    assert peers_of(2, 4) == [0, 1, 3]
    assert peers_of(4, 9) == [0, 3, 5]
    assert peers_of(0, 9) == list(range(1, 9))


def test_a_request_reaches_other_nodes_as_text() -> None:
    request = ProbeRequest(json=True, ranks=4, device="cpu", findings=(Finding("login", "ok", "x", host="a"),))
    assert ProbeRequest.from_text(request.to_text()) == request
    target = workload(request).target
    assert target is not None and (target.name, target.args) == (
        "paceline.tools.doctor.node_probe",
        (request.to_text(),),
    )


def test_each_host_gets_one_rank(tmp_path: Path) -> None:
    spec = one_rank_per_node(LaunchSpec(hosts="a:4,me@b,me@[fd00::2]:2", ranks=8, run="x"))
    assert (spec.hosts, spec.ranks, spec.run) == ("a:1,me@b:1,me@[fd00::2]:1", 1, None)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=4\n")
    assert one_rank_per_node(LaunchSpec(hosts=str(hostfile))).hosts == "a:1,b:1"
    assert one_rank_per_node(LaunchSpec(ray="auto")).hosts is None


@pytest.mark.parametrize("chosen", ["lo", "no-such-interface", ""])
def test_the_address_is_that_of_the_chosen_interface_or_leads_to_the_store(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1" if chosen == "lo" else "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert own_address() == LOOPBACK


def test_the_interface_that_the_launcher_chose_is_not_one_that_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as the launcher does for a store on loopback
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    found = users_environment()
    assert "GLOO_SOCKET_IFNAME" not in found
    assert found["NCCL_SOCKET_IFNAME"] == "eth7"


def test_a_node_knows_its_interface_and_versions() -> None:
    facts = node_facts(LOOPBACK, 4001, "cpu", [Finding("disk", "warn", "full")])
    assert (facts.interface, facts.port, facts.gpus) == ("lo", 4001, [])
    assert facts.mtu > 1000
    assert facts.versions == fingerprint(script=None, recipe=None)["version"]
    assert facts.findings == [{"check": "disk", "status": "warn", "what": "full"}]


def test_the_interface_of_an_ipv6_address_is_unknown() -> None:
    facts = node_facts("::1", 4001, "cpu", [])
    assert (facts.interface, facts.mtu) == ("", 0)


GOOD = AllReduceResult("gloo", 0.001, 0.1)


@ranks(2)
def test_ranks_that_can_communicate_report_two_times() -> None:
    result = all_reduce("cpu", None)
    assert result.error == "" and result.backend == "gloo"
    assert result.small > 0 and result.large > 0


def test_a_backend_that_cannot_start_is_an_error_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = all_reduce("cpu", "nccl")
    assert "nccl" in result.error and not result.is_stuck


def test_one_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(node_probe, "_run", lambda *_: ended.wait())
    try:
        result = all_reduce("cpu", None, seconds=0.1)
    finally:
        ended.set()
    assert result.is_stuck and "0.1 s" in result.error


def test_the_slowest_node_counts() -> None:
    finding = judge_all_reduce(["a", "b"], [GOOD, AllReduceResult("gloo", 0.002, 0.05)])
    assert (finding.status, finding.what) == ("ok", "2 nodes, gloo: 2.0 ms for one number, 100 ms for 16 MiB")


def test_the_node_that_fails_first_is_named_with_its_error() -> None:
    waited = AllReduceResult(error="timed out", took=20.0)
    finding = judge_all_reduce(["a", "b", "c"], [waited, AllReduceResult(error="no such device", took=0.1), GOOD])
    assert (finding.status, finding.host) == ("fail", "b")
    assert finding.what == "An all-reduce fails first on b: no such device"
