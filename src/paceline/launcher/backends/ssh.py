"""Launches on hosts over ssh.

Each host is reached by one `ssh HOST "cd FOLDER && exec PYTHON -P -m paceline node"`. The order, which contains the
token, the script, its arguments and its environment, is sent over standard input, so it appears in no process list and
is not parsed by a shell. The ssh client of the system is used, with the user's keys, aliases and known hosts.

The command that sshd passes to the login shell contains only two values chosen by the user: the working directory and
the interpreter. They are quoted. Characters that shells treat differently inside quotes (fish: backslashes; csh:
exclamation marks and newlines) are rejected.

Hosts are given by `--hosts`:

    --hosts a,b                      -n ranks on each host, or one per GPU
    --hosts a:4,me@b:4,[fd00::2]:2   a number of ranks for each host
    --hosts FILE                     one host per line: `a slots=4`, as for MPI and DeepSpeed, or `a:4`

Names are passed to ssh, which passes them to programs in the user's configuration. Therefore a name may only contain
letters, digits, dots, dashes and underscores, and must not start with a dot or a dash, so that it is never taken for an
option or interpreted by a shell. It may be an alias from the ssh configuration, so it is not resolved here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.backends.subprocesses import SubprocessBackend
from paceline.launcher.cluster import frontend
from paceline.launcher.workload import Workload

_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # no prompts
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5"),  # detects a dead host within 15 s
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # a shared connection would outlive the job
)
_MAX_PATH = 4096  # bytes
_QUOTED_DIFFERENTLY = re.compile(r"[\x00-\x1f\x7f\\!]")
# A server that is flooded (MaxStartups) or restarts, or a network that fails. Others, also a host that does not answer,
# are for the user to mend.
_DROPPED = re.compile(
    r"^(?:\w+_exchange_identification: |ssh: connect to host .* Connection reset|client_loop: |"
    r"Connection (?:closed|reset) by |Timeout, server )",
    re.MULTILINE,
)
_LOST = "exit status 255"
_MEANINGS = {  # of exit statuses of ssh (255) and of the shell (127)
    _LOST: "ssh could not log in, lost the connection, or the launcher there was killed (exit status 255)",
    "exit status 127": "the interpreter was not found there (exit status 127); use --python to select another one",
}


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Start a launcher on each host of `--hosts`."""
    hosts = read_hosts(spec.hosts or "")
    remote = node_command(str(Path.cwd()), spec.python or sys.executable)
    ssh = read_ssh(spec.ssh or "ssh")
    ranks = [host.ranks or spec.ranks for host in hosts]
    if spec.dry_run:
        for host, number in zip(hosts, ranks, strict=True):
            started = f"{number} ranks" if number else "one rank per GPU"
            print(f"would start {started} on {host.name}: {shlex.join([*ssh, host.name, remote])}")  # noqa: T201
        return 0
    backend = SshBackend(hosts, remote, ssh=ssh, patience=spec.grace)
    wanted = frontend.with_nodes(spec, len(hosts))
    return frontend.launch_on(backend, workload, wanted, ranks, address=spec.address).status


class SshBackend(SubprocessBackend):
    """Runs `command` on each host. `ssh` is the program with the user's options, which override the defaults."""

    def __init__(self, hosts: Sequence[Host], command: str, *, ssh: Sequence[str] = ("ssh",), patience: float) -> None:
        if shutil.which(ssh[0]) is None:
            raise LaunchError(
                "no-ssh",
                f"Program not found: {ssh[0]!r}.",
                fix="install the OpenSSH client (Debian: openssh-client), or pass another program with --ssh",
            )
        super().__init__([host.name for host in hosts], lambda node: ssh_argv(hosts[node], command, ssh), patience)

    def ended(self) -> dict[int, str]:
        return {node: _explain(text) for node, text in super().ended().items()}

    def is_accident(self, reason: str) -> bool:
        """ssh that failed without a word was started, and its launcher there was killed."""
        return super().is_accident(reason) or reason == _MEANINGS[_LOST] or bool(_DROPPED.search(reason))


def read_ssh(text: str) -> tuple[str, ...]:
    """Split `--ssh 'ssh -p 2222 -i key'` into the program and its options."""
    try:
        words = tuple(shlex.split(text))
    except ValueError:  # unbalanced quotes
        words = ()
    if not words or "\0" in text:
        raise LaunchError("no-ssh", f"Invalid value for --ssh: {text!r}.", fix="pass e.g. --ssh 'ssh -p 2222 -i key'")
    return words


def ssh_argv(host: Host, command: str, ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """ssh uses the first value of an option, so the user's options precede the defaults."""
    return [*ssh, *_OPTIONS, "--", host.name, command]


def node_command(folder: str, python: str) -> str:
    """The remote command of a launcher. `-P` keeps modules in the working directory from shadowing others."""
    return remote_command(folder, [python, "-P", "-m", "paceline", "node"])


def remote_command(folder: str, argv: Sequence[str]) -> str:
    """A command line for the login shell that runs `argv` in `folder`."""
    for text in (folder, *argv):
        _require_quotable(text)
    if not folder.startswith("/"):  # `cd` might take it for an option, or search CDPATH
        raise LaunchError("unsafe-path", f"Expected an absolute path, got {folder!r}.", fix="pass an absolute path")
    if argv[0].startswith("-"):
        raise LaunchError("unsafe-path", f"Invalid interpreter: {argv[0]!r}.", fix="pass --python /path/to/python3")
    return f"cd {_quoted(folder)} && exec {' '.join(map(_quoted, argv))}"


def _quoted(text: str) -> str:
    """Always single-quoted: `shlex.quote` leaves some words unquoted, and zsh expands `=a` to the path of a program."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _require_quotable(text: str) -> None:
    try:
        size = len(os.fsencode(text))
    except UnicodeEncodeError:
        size = 0
    if not 0 < size < _MAX_PATH or _QUOTED_DIFFERENTLY.search(text):
        raise LaunchError(
            "unsafe-path",
            f"Path cannot be used in a remote command: {text[:60]!a}.",
            why="it is empty or too long, or contains a control character, a backslash or an exclamation mark, which "
            "shells interpret differently",
            fix="launch from another directory, or use another interpreter",
        )


def _explain(text: str) -> str:
    status, *last_lines = text.split("\n")
    return "\n".join([_MEANINGS.get(status, status), *last_lines])


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
        lines = [line.partition("#")[0].strip(" \t") for line in _read(text).splitlines()]
        hosts = tuple(_host(line, f"line {number} of {text!r}") for number, line in enumerate(lines, 1) if line)
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
                fix=f"list it once, with its total number of ranks, e.g. {host.name}:8",
            )
        seen.add(host.machine)


def _short(text: str) -> str:
    """Quoted and shortened, without control characters."""
    return ascii(text if len(text) <= 60 else text[:60] + "…")
