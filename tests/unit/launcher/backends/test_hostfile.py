"""Reading `--hosts` and hostfiles. What is hostile is in tests/faults/test_hostile_launch.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launcher.backends.hostfile import Host, read_hosts


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
