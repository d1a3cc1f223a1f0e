from __future__ import annotations

import socket

import pytest

from paceline.errors import LaunchError
from paceline.runtime.network import LOOPBACK, interface_of, is_loopback, listen, own_addresses_of


def test_a_free_port_is_found_and_accepts_connections() -> None:
    with listen(LOOPBACK, None) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, peer = listener.accept()
        with accepted:
            assert peer == client.getsockname()


def test_a_port_in_use_has_a_code() -> None:
    with listen(LOOPBACK, None) as listener, pytest.raises(LaunchError) as caught:
        listen(LOOPBACK, listener.getsockname()[1])
    assert caught.value.code == "launch.port-in-use"


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_an_invalid_port_has_a_code(port: int) -> None:
    with pytest.raises(LaunchError) as caught:
        listen(LOOPBACK, port)
    assert caught.value.code == "launch.bad-number"


def test_loopback_addresses_are_recognized() -> None:
    assert is_loopback("127.8.0.1") and is_loopback("::1") and not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%eth0")


def test_only_addresses_that_this_machine_can_bind_are_its_own() -> None:
    assert own_addresses_of(LOOPBACK) == [LOOPBACK] and LOOPBACK in own_addresses_of("localhost")
    assert own_addresses_of("192.0.2.77") == []  # reserved for documentation: nobody has it
    assert own_addresses_of("no-such-host.invalid") == []


def test_an_address_that_no_interface_has_gives_none() -> None:
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("192.0.2.77") is None
