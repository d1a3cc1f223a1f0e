"""The ssh command. What hosts do with it is in tests/system; what is hostile in tests/faults/test_hostile_launch.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launcher.backends.ssh import Host, SshBackend, node_command, read_hosts, read_ssh, ssh_argv


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


def refusal(text: str) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        read_hosts(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:4,b:2", [Host("a", 4), Host("b", 2)]),
        ("gpu-01.example.org, me@gpu_02:8", [Host("gpu-01.example.org"), Host("me@gpu_02", 8)]),
        ("10.0.0.7:4", [Host("10.0.0.7", 4)]),
        ("[fd00::2]:4,[fd00::3]", [Host("fd00::2", 4), Host("fd00::3")]),
        ("me@[fe80::1%eth0]:4", [Host("me@fe80::1%eth0", 4)]),
    ],
)
def test_hosts_are_read_in_their_order(in_folder: Path, text: str, hosts: list[Host]) -> None:
    assert read_hosts(text) == tuple(hosts)


def test_a_hostfile_may_be_mpis_or_ours(in_folder: Path) -> None:
    Path("hostfile").write_text(
        "# the fast ones\na slots=4\n\n  me@b   slots = 2  # shared\r\nc:8\nd\n[fd00::2] slots=1\n"
    )
    expected = (Host("a", 4), Host("me@b", 2), Host("c", 8), Host("d"), Host("fd00::2", 1))
    assert read_hosts("hostfile") == expected
    assert read_hosts(str(in_folder / "hostfile")) == expected


@pytest.mark.parametrize(
    "text",
    ["", "a,", "a:0", "a:-1", "a:four", "a:10000", "a:٤", "fd00::2", "[fd00::zz]", "[a]:4", "a:4:4", "a b", "@a", "a@",
     "-a", "a" * 254, "me@-a", "-oProxyCommand=x", "a;b", "münchen"],
)  # fmt: skip
def test_an_invalid_host_is_refused(in_folder: Path, text: str) -> None:
    assert refusal(text).code == "launch.bad-hosts"


def test_a_bad_line_of_a_hostfile_is_named(in_folder: Path) -> None:
    Path("hostfile").write_text("a slots=4\nb slots=4 max-slots=8\n")
    error = refusal("hostfile")
    assert error.code == "launch.bad-hosts"
    assert "line 2 of 'hostfile': 'b slots=4 max-slots=8'" in error.what


@pytest.mark.parametrize("hosts", ["a,b,a", "a:2,A:2", "me@a,you@a"])
def test_a_host_that_is_named_twice_is_refused(in_folder: Path, hosts: str) -> None:
    assert refusal(hosts).code == "launch.same-host-twice"


def test_an_empty_hostfile_is_refused(in_folder: Path) -> None:
    Path("hostfile").write_text("# nobody\n\n")
    assert refusal("hostfile").code == "launch.bad-hosts"


def test_a_path_without_a_file_is_told_from_a_host(in_folder: Path) -> None:
    assert refusal("./hostfile").code == "launch.no-hostfile"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a slots=4\n" * 200_000])
def test_an_invalid_hostfile_is_refused(in_folder: Path, content: bytes) -> None:
    Path("model.pt").write_bytes(content)
    assert refusal("model.pt").code == "launch.no-hostfile"
