from __future__ import annotations

from paceline.launcher.interface import interface_of
from paceline.runtime.network import LOOPBACK


def test_an_address_that_no_interface_has_gives_none() -> None:
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("192.0.2.77") is None
