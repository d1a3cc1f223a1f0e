"""Parses `--hosts` and hostfiles.

    --hosts a,b                      -n ranks on each host, or one per GPU
    --hosts a:4,me@b:4,[fd00::2]:2   a number of ranks for each host
    --hosts FILE                     one host per line: `a slots=4`, as for MPI and DeepSpeed, or `a:4`

Names are passed to ssh, which passes them to programs in the user's configuration. Therefore a name may only contain
letters, digits, dots, dashes and underscores, and must not start with a dot or a dash, so that it is never taken for an
option or interpreted by a shell. It may be an alias from the ssh configuration, so it is not resolved here.
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
_MAX_FILE = 1_000_000  # bytes


@dataclass(frozen=True)
class Host:
    """The name of a host as ssh expects it, with an optional user, and its number of ranks."""

    name: str
    ranks: int | None = None

    @property
    def machine(self) -> str:
        """The name without the user, in lower case."""
        return self.name.rpartition("@")[2].lower()


def read_hosts(text: str) -> tuple[Host, ...]:
    """The hosts in a hostfile, if `text` is the path of a file; otherwise those listed in `text`."""
    if _is_file(text):
        hosts = tuple(_in_lines(text))
        if not hosts:
            raise LaunchError(
                "bad-hosts", f"The hostfile {text!r} contains no hosts.", fix="write one host per line: host slots=4"
            )
    elif "/" in text:
        raise LaunchError("no-hostfile", f"Hostfile not found: {_short(text)}.", fix="check the path")
    else:
        hosts = tuple(_host(entry.strip(" "), "--hosts") for entry in text.split(","))
    _require_unique(hosts)
    return hosts


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # not a valid path
        return False


def _in_lines(path: str) -> Iterator[Host]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        entry = line.partition("#")[0].strip(" \t")
        if entry:
            yield _host(entry, f"line {number} of {path!r}")


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise LaunchError("no-hostfile", f"{path!r} is too large for a hostfile.", fix="check the path")
        return data.decode("ascii")
    except OSError as error:
        raise LaunchError(
            "no-hostfile", f"Cannot read the hostfile {path!r}: {error.strerror}.", fix="check its permissions"
        ) from None
    except UnicodeDecodeError as error:
        raise LaunchError(
            "no-hostfile",
            f"Invalid hostfile {path!r}: byte {error.start} is not ASCII.",
            why="host names are ASCII",
            fix="check the path",
        ) from None


def _host(entry: str, where: str) -> Host:
    match = _ENTRY.fullmatch(_SLOTS.sub(":", entry, count=1))
    if match is None or (match["address"] and not _is_address(match["address"])):
        raise LaunchError(
            "bad-hosts",
            f"Invalid host in {where}: {_short(entry)}.",
            why="names consist of letters, digits, dots, dashes and underscores; the number of ranks is from 1 to 9999",
            fix="write host, host:ranks or user@host:ranks; put an IPv6 address in brackets: [fd00::2]:4",
        )
    machine = match["name"] or match["address"] + (match["zone"] or "")
    return Host((match["user"] or "") + machine, int(match["ranks"]) if match["ranks"] else None)


def _is_address(text: str) -> bool:
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True


def _require_unique(hosts: Iterable[Host]) -> None:
    seen: set[str] = set()
    for host in hosts:
        if host.machine in seen:
            raise LaunchError(
                "same-host-twice",
                f"Duplicate host: {host.machine}.",
                why="each host runs a single launcher, which starts all of its ranks",
                fix=f"list it once, with its total number of ranks, e.g. {host.name}:8",
            )
        seen.add(host.machine)


def _short(text: str) -> str:
    """Quoted and shortened, without control characters."""
    return ascii(text if len(text) <= 60 else text[:60] + "…")
