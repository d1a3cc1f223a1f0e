"""Machines that ssh reaches.

For each host this machine runs one `ssh HOST "cd FOLDER && exec PYTHON -P -m paceline node"`. The order, with the job's
token, the script, its arguments and its environment, goes through standard input, so none of it is in a process list,
and no shell reads it. The system's own ssh is used, with the user's keys, aliases and known hosts.

Of what a user chose, only the folder and the interpreter are in that command, which sshd gives to the login shell over
there. They are quoted. What is not the same between the quotes of all shells (fish reads backslashes there, csh
exclamation marks and new lines) is refused.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.backends.hostfile import Host, read_hosts
from paceline.launcher.backends.subprocesses import SubprocessBackend
from paceline.launcher.cluster import frontend
from paceline.launcher.workload import Workload

_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # nobody is there to answer questions of several machines at once
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5"),  # a machine that lost its power is noticed within 15 s
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # a connection that others share would stay behind
)
_LONGEST = 4096  # bytes of a path
_QUOTED_DIFFERENTLY = re.compile(r"[\x00-\x1f\x7f\\!]")
_MEANINGS = {  # of ssh's own 255 and the shell's 127
    "exit status 255": "ssh could not log in, lost the connection, or the launcher there was killed (exit status 255)",
    "exit status 127": "the interpreter was not found there (exit status 127); --python names another",
}


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Start a launcher on each of `--hosts`."""
    hosts = read_hosts(spec.hosts or "")
    remote = node_command(str(Path.cwd()), spec.python or sys.executable)
    backend = SshBackend(hosts, remote, ssh=read_ssh(spec.ssh or "ssh"), patience=spec.grace)
    ranks = [host.ranks or spec.ranks for host in hosts]
    wanted = frontend.with_nodes(spec, len(hosts))
    return frontend.launch_on(backend, workload, wanted, ranks, address=spec.address).status


class SshBackend(SubprocessBackend):
    """Runs `command` on each host. `ssh` is the program with options of the user's, which win over ours."""

    def __init__(self, hosts: Sequence[Host], command: str, *, ssh: Sequence[str] = ("ssh",), patience: float) -> None:
        if shutil.which(ssh[0]) is None:
            raise LaunchError(
                "no-ssh",
                f"There is no program {ssh[0]!r} here.",
                fix="install the OpenSSH client (Debian: openssh-client), or name another: --ssh /opt/bin/ssh",
            )
        super().__init__([host.name for host in hosts], lambda node: ssh_argv(hosts[node], command, ssh), patience)

    def ended(self) -> dict[int, str]:
        return {node: _explained(words) for node, words in super().ended().items()}


def read_ssh(text: str) -> tuple[str, ...]:
    """The program and its options, as in `--ssh 'ssh -p 2222 -i key'`. No shell reads them."""
    try:
        words = tuple(shlex.split(text))
    except ValueError:  # a quote that is not closed
        words = ()
    if not words or "\0" in text:
        raise LaunchError("no-ssh", f"{text!r} is no ssh command.", fix="such as --ssh 'ssh -p 2222 -i key'")
    return words


def ssh_argv(host: Host, command: str, ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """ssh takes the first value that it is given for an option, so the user's come before ours."""
    return [*ssh, *_OPTIONS, "--", host.name, command]


def node_command(folder: str, python: str) -> str:
    """What starts a node's launcher over there. `-P`, because that folder holds the user's modules, not ours."""
    return remote_command(folder, [python, "-P", "-m", "paceline", "node"])


def remote_command(folder: str, argv: Sequence[str]) -> str:
    """One string for a login shell that runs `argv` in `folder`."""
    for text in (folder, *argv):
        _require_quotable(text)
    if not folder.startswith("/"):  # `cd` might take it for an option, or look for it in a CDPATH
        raise LaunchError(
            "unsafe-path", f"The folder {folder!r} does not begin with a slash.", fix="give its whole path"
        )
    if argv[0].startswith("-"):
        raise LaunchError("unsafe-path", f"{argv[0]!r} is an option, not a program.", fix="--python /opt/bin/python3")
    return f"cd {_quoted(folder)} && exec {' '.join(map(_quoted, argv))}"


def _quoted(text: str) -> str:
    """Always in single quotes: `shlex.quote` leaves some words bare, of which zsh reads `=a` as a program's path."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _require_quotable(text: str) -> None:
    try:
        size = len(os.fsencode(text))
    except UnicodeEncodeError:
        size = 0
    if not 0 < size < _LONGEST or _QUOTED_DIFFERENTLY.search(text):
        raise LaunchError(
            "unsafe-path",
            f"{text[:60]!a} can't be part of a command on another host.",
            why="it is empty or too long, or holds a control character, a backslash or an exclamation mark, which the "
            "shells of hosts read in different ways",
            fix="start from another folder, or with another interpreter",
        )


def _explained(words: str) -> str:
    how, *last_lines = words.split("\n")
    return "\n".join([_MEANINGS.get(how, how), *last_lines])
