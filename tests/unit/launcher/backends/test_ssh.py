"""The ssh command. What hosts do with it is in tests/system; what is hostile in tests/faults/test_hostile_launch.py."""

from __future__ import annotations

import pytest

from paceline.errors import LaunchError
from paceline.launcher.backends.hostfile import Host
from paceline.launcher.backends.ssh import SshBackend, node_command, read_ssh, ssh_argv


def test_the_command_of_a_node() -> None:
    command = node_command("/home/me/my code", "/opt/venv/bin/python")
    assert command == "cd '/home/me/my code' && exec '/opt/venv/bin/python' '-P' '-m' 'paceline' 'node'"


def test_the_users_options_come_first_and_none_after_the_host() -> None:
    argv = ssh_argv(Host("me@a"), "true", read_ssh("ssh -p 2222 -i 'my key' -o ConnectTimeout=60"))
    assert argv[:7] == ["ssh", "-p", "2222", "-i", "my key", "-o", "ConnectTimeout=60"]
    assert argv.index("ConnectTimeout=60") < argv.index("ConnectTimeout=10")
    assert argv[-3:] == ["--", "me@a", "true"]


@pytest.mark.parametrize("text", ["", "  ", "ssh 'key", "ssh\0"])
def test_an_invalid_ssh_command_is_refused(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_ssh(text)
    assert caught.value.code == "launch.no-ssh"


def test_a_missing_ssh_program_is_named_before_anything_starts() -> None:
    with pytest.raises(LaunchError) as caught:
        SshBackend([Host("a")], "true", ssh=("no-such-ssh",), patience=1.0)
    assert caught.value.code == "launch.no-ssh"
    assert "no-such-ssh" in caught.value.what


@pytest.mark.parametrize(
    ("reason", "is_accident"),
    [
        ("ssh could not log in\nkex_exchange_identification: Connection closed by remote host", True),
        ("ssh could not log in\nConnection reset by 10.0.0.1 port 22", True),
        ("killed by SIGKILL", True),
        ("ssh could not log in\nme@a: Permission denied (publickey).", False),
        ("ssh could not log in\nssh: Could not resolve hostname a: Name or service not known", False),
        ("ssh could not log in\nssh: connect to host a port 22: Connection refused", False),
        ("exit status 1\nConnectionResetError: Connection reset by peer", False),
    ],
)
def test_a_connection_that_was_dropped_is_tried_again(reason: str, is_accident: bool) -> None:
    backend = SshBackend([Host("a")], "true", ssh=("true",), patience=1.0)
    assert backend.is_accident(reason) == is_accident


@pytest.mark.parametrize(
    ("folder", "python"), [("runs", "python"), ("/runs", "-python"), ("/a\\b", "python"), ("", "x")]
)
def test_a_path_that_shells_might_read_differently_is_refused(folder: str, python: str) -> None:
    with pytest.raises(LaunchError) as caught:
        node_command(folder, python)
    assert caught.value.code == "launch.unsafe-path"
