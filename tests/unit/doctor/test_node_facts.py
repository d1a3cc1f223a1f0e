from __future__ import annotations

import pytest

from paceline.doctor.finding import Finding
from paceline.doctor.node_facts import node_facts, own_address, users_environment
from paceline.launcher.cluster.fingerprint import fingerprint
from paceline.runtime.network import LOOPBACK


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
