"""The store of the ranks listens on one address, if it is clear which one."""

from __future__ import annotations

import pytest

from listening import listeners
from nodes import reserve_ports
from paceline.errors import LaunchError
from paceline.runtime.network import LOOPBACK, listen
from paceline.runtime.store import open_store_at


def test_a_store_listens_on_the_address_of_its_host_only() -> None:
    port = reserve_ports()
    store = open_store_at(LOOPBACK, port)
    assert store is not None and [each.address for each in listeners() if each.port == port] == [LOOPBACK]
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["192.0.2.77", "no.such.host.invalid"])
def test_a_host_elsewhere_gives_no_store(host: str) -> None:
    assert open_store_at(host, reserve_ports()) is None


def test_a_port_in_use_is_named() -> None:
    with listen(LOOPBACK, None) as taken, pytest.raises(LaunchError, match=r"port-in-use.*Address already in use"):
        open_store_at(LOOPBACK, taken.getsockname()[1])
