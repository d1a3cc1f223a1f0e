"""Machines, as far as the network is concerned: namespaces of the kernel, two of them joined by a cable (a veth pair),
or several by a switch (a bridge).

Each has an address of its own, an interface of its own and its own ports, and reaches the others and nobody else. Only
root can make them. Their names hold this process's number; in the end they are gone, and with them the cables.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Machine:
    name: str
    interface: str
    address: str

    def enter(self) -> None:
        """This process, and those that it starts from now on, are on that machine."""
        with Path("/run/netns", self.name).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def cut_off(self) -> None:
        """Pull the cable: nothing is told to anybody, as when a machine loses power."""
        _ip("-n", self.name, "link", "set", self.interface, "down")

    def heal(self) -> None:
        """Put the cable back."""
        _ip("-n", self.name, "link", "set", self.interface, "up")

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports at which somebody listens there."""
        lines = _run("ip", "netns", "exec", self.name, "ss", "-Hltn").splitlines()
        found = [line.split()[3].rpartition(":") for line in lines]
        return {(host.strip("[]"), int(port)) for host, _, port in found}


@contextmanager
def joined() -> Iterator[tuple[Machine, Machine]]:
    both = tuple(
        Machine(f"paceline-{os.getpid()}-{letter}", f"pl{os.getpid()}{letter}", f"10.77.0.{number}")
        for number, letter in ((1, "a"), (2, "b"))
    )
    first, second = both
    with _made(both):
        # Made inside of a namespace, so that it is nowhere else, not even for a moment.
        cable = ("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        _ip("-n", first.name, *cable, "netns", second.name)
        _connect(both)
        yield first, second


@contextmanager
def switched(number: int) -> Iterator[tuple[Machine, ...]]:
    """So many machines at one switch, which is in the first of them."""
    machines = tuple(
        Machine(f"paceline-{os.getpid()}-s{index}", f"pl{os.getpid()}s{index}", f"10.78.0.{index + 1}")
        for index in range(number)
    )
    first, *others = machines
    with _made(machines):
        _ip("-n", first.name, "link", "add", first.interface, "type", "bridge")
        for machine in others:
            port = f"{machine.interface}p"
            cable = ("link", "add", port, "master", first.interface, "type", "veth", "peer", "name", machine.interface)
            _ip("-n", first.name, *cable, "netns", machine.name)
            _ip("-n", first.name, "link", "set", port, "up")
        _connect(machines)
        yield machines


@contextmanager
def _made(machines: Sequence[Machine]) -> Iterator[None]:
    made = []
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
            made.append(machine)
        yield
    finally:
        for machine in made:
            _ip("netns", "delete", machine.name)


def _connect(machines: Sequence[Machine]) -> None:
    for machine in machines:
        _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", machine.interface)
        for interface in ("lo", machine.interface):
            _ip("-n", machine.name, "link", "set", interface, "up")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
