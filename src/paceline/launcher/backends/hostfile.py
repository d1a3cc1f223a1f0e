"""Which machines, as a person writes them.

    --hosts a,b                      ranks as on any machine: -n, or one for each GPU
    --hosts a:4,me@b:4,[fd00::2]:2   so many ranks on each
    --hosts FILE                     a line for each: `a slots=4`, as MPI and DeepSpeed write it, or `a:4`

A name becomes an argument of ssh, which hands it on to programs that the user's configuration names. So a name is made
of letters, digits, dots, dashes and underscores, and begins with a letter, a digit or an underscore: it is no option,
and nothing that a shell would act on. It may be an alias from the ssh configuration, so it is not looked up here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from paceline.errors import LaunchError

_USER = r"(?P<user>[A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?"
_NAME = r"(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]{0,252})"
_ADDRESS = r"\[(?P<address>[0-9A-Fa-f:.]{2,45})(?P<zone>%[A-Za-z0-9_.-]{1,15})?\]"
_ENTRY = re.compile(rf"{_USER}(?:{_NAME}|{_ADDRESS})(?::(?P<ranks>[1-9][0-9]{{0,3}}))?")
_SLOTS = re.compile(r"[ \t]+slots[ \t]*=[ \t]*")
_LARGEST_FILE = 1_000_000  # bytes: far more than the machines of any cluster
_FIX = "write host, host:ranks or user@host:ranks; an IPv6 address in brackets, [fd00::2]:4"


@dataclass(frozen=True)
class Host:
    """A machine: its name as ssh takes it, with the user where one was given, and the ranks asked for on it."""

    name: str
    ranks: int | None = None

    @property
    def machine(self) -> str:
        """The name without the user. Case does not count in names of machines."""
        return self.name.rpartition("@")[2].lower()


def read_hosts(text: str) -> tuple[Host, ...]:
    """The machines of `--hosts`: those of the hostfile where `text` is the path of a file, else those in `text`."""
    if _is_file(text):
        hosts = tuple(_in_lines(text))
        if not hosts:
            raise LaunchError(
                "bad-hosts", f"The hostfile {text!r} names no host.", fix="one line for each: host slots=4"
            )
    elif "/" in text:
        raise LaunchError("no-hostfile", f"There is no hostfile at {_short(text)}.", fix="check the path")
    else:
        hosts = tuple(_host(entry.strip(" "), "--hosts") for entry in text.split(","))
    _require_apart(hosts)
    return hosts


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a character that paths can't hold
        return False


def _in_lines(path: str) -> Iterator[Host]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        entry = line.partition("#")[0].strip(" \t")
        if entry:
            yield _host(entry, f"Line {number} of {path!r}")


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise LaunchError("no-hostfile", f"{path!r} is too large for a hostfile.", fix="check the path")
        return data.decode("ascii")
    except OSError as error:
        raise LaunchError(
            "no-hostfile", f"The hostfile {path!r} can't be read: {error.strerror}.", fix="check its rights"
        ) from None
    except UnicodeDecodeError as error:
        raise LaunchError(
            "no-hostfile",
            f"{path!r} is no hostfile: byte {error.start} is no plain letter.",
            why="names of hosts are ASCII",
            fix="check the path",
        ) from None


def _host(entry: str, where: str) -> Host:
    match = _ENTRY.fullmatch(_SLOTS.sub(":", entry, count=1))
    if match is None or (match["address"] and not _is_address(match["address"])):
        raise LaunchError(
            "bad-hosts",
            f"{where} says {_short(entry)}, which is no host.",
            why="a name is letters, digits, dots, dashes and underscores; ranks are a number from 1 to 9999",
            fix=_FIX,
        )
    machine = match["name"] or match["address"] + (match["zone"] or "")
    return Host((match["user"] or "") + machine, int(match["ranks"]) if match["ranks"] else None)


def _is_address(text: str) -> bool:
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True


def _require_apart(hosts: Iterable[Host]) -> None:
    seen: set[str] = set()
    for host in hosts:
        if host.machine in seen:
            raise LaunchError(
                "same-host-twice",
                f"The host {host.machine} is named twice.",
                why="each machine has one launcher, for all of its ranks",
                fix=f"name it once, with the sum of the ranks: {host.name}:8",
            )
        seen.add(host.machine)


def _short(text: str) -> str:
    """Quoted, so that no character of it acts on the terminal."""
    return ascii(text if len(text) <= 60 else text[:60] + "…")
