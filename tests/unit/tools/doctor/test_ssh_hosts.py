"""Judgements from recorded output of ssh (OpenSSH 9.2). tests/system/test_doctor_hosts.py logs in for real."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.launcher.backends.ssh import Host
from paceline.tools.doctor import ssh_hosts
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.ssh_hosts import HostAnswer

HOST = Host("me@b")
HERE = {"paceline": "1.0", "python": "3.12.1", "torch": "2.13.0"}
GOOD: dict[str, Any] = {
    "address": "10.0.0.2",
    "versions": HERE,
    "has_folder": True,
    "connection": {"address": "10.0.0.1", "clock_offset": 0.01},
    "import_error": "",
}
CHANGED_KEY = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Offending ED25519 key in /home/me/.ssh/known_hosts:4
Host key verification failed.
"""


def judge(answer: HostAnswer, here: dict[str, str] = HERE) -> list[Finding]:
    return ssh_hosts.judge(HOST, answer, here, python="/opt/my python", folder="/data/my job")


def found(answer: HostAnswer, check: str, here: dict[str, str] = HERE) -> Finding:
    [finding] = [each for each in judge(answer, here) if each.check == check]
    assert finding.host == "me@b"
    return finding


def test_a_good_host_is_ok_and_says_what_was_checked() -> None:
    findings = judge(HostAnswer(0, GOOD))
    assert {each.status for each in findings} == {"ok"}
    assert [each.check for each in findings] == ["login", "versions", "working directory", "connection back", "clock"]


@pytest.mark.parametrize(
    "said, fix",
    [
        ("me@b: Permission denied (publickey,password).\n", "ssh-copy-id me@b"),
        ("No ED25519 host key is known for b.\nHost key verification failed.\n", "ssh me@b"),
        (CHANGED_KEY, "ssh-keygen -R b"),
        ("ssh: Could not resolve hostname b: Name or service not known\n", "/etc/hosts"),
        ("ssh: connect to host b port 22: Connection refused\n", "sudo systemctl enable --now ssh"),
        ("ssh: connect to host b port 22: Connection timed out\n", "sudo ufw allow ssh"),
        ("ssh: connect to host b port 22: No route to host\n", "ping b"),
        ("kex_exchange_identification: Connection closed by remote host\n", "ssh -v me@b"),
        ("", "ssh -v me@b"),
    ],
)
def test_a_failed_login_has_the_last_line_of_ssh_and_a_fix(said: str, fix: str) -> None:
    [finding] = judge(HostAnswer(255, errors=said))
    assert (finding.check, finding.status, finding.host) == ("login", "fail", "me@b")
    assert finding.what.startswith("Cannot log in to me@b")
    assert finding.what.endswith((said.splitlines() or [""])[-1])
    assert fix in finding.fix


def test_a_login_that_does_not_end_is_a_failure() -> None:
    [finding] = judge(HostAnswer(None))
    assert (finding.status, finding.what) == ("fail", "No answer within 15 s from me@b")
    assert "firewall" in finding.fix


@pytest.mark.parametrize("status", [126, 127])
def test_a_missing_interpreter_is_a_failure_after_a_good_login(status: int) -> None:
    answer = HostAnswer(status, errors="bash: line 1: /opt/my python: No such file or directory\n")
    assert found(answer, "login").status == "ok"
    finding = found(answer, "versions")
    assert finding.status == "fail"
    assert finding.what.endswith("No such file or directory")
    assert "--python" in finding.fix


def test_another_version_is_a_failure_with_both_values_and_the_pip_command() -> None:
    finding = found(HostAnswer(0, {**GOOD, "versions": {**HERE, "torch": "2.12.0"}}), "versions")
    assert (finding.status, finding.what) == ("fail", "torch is 2.13.0 here and 2.12.0 on me@b.")
    assert finding.fix == "ssh me@b '/opt/my python' -m pip install torch==2.13.0"


def test_a_build_of_torch_is_installed_from_its_index() -> None:
    here = {**HERE, "torch": "2.13.0+cu130"}
    fix = found(HostAnswer(0, GOOD), "versions", here).fix
    assert fix.endswith("torch==2.13.0+cu130 --extra-index-url https://download.pytorch.org/whl/cu130")


def test_another_python_is_a_failure_that_pip_does_not_fix() -> None:
    finding = found(HostAnswer(0, {**GOOD, "versions": {**HERE, "python": "3.11.2"}}), "versions")
    assert finding.status == "fail"
    assert "pip" not in finding.fix and "--python" in finding.fix


def test_a_missing_folder_is_a_failure_with_the_command_that_creates_it() -> None:
    finding = found(HostAnswer(0, {**GOOD, "has_folder": False}), "working directory")
    assert finding.status == "fail"
    assert "ssh me@b mkdir -p '/data/my job'" in finding.fix


def test_a_blocked_connection_to_this_machine_is_a_failure_with_the_command_that_opens_it() -> None:
    blocked = {**GOOD, "connection": {"errors": ["10.0.0.1:40001: timed out"]}}
    finding = found(HostAnswer(0, blocked), "connection back")
    assert finding.status == "fail"
    assert "10.0.0.1:40001: timed out" in finding.what
    assert "sudo ufw allow proto tcp from 10.0.0.2" in finding.fix
    assert "clock" not in {each.check for each in judge(HostAnswer(0, blocked))}


def test_a_wrong_clock_is_judged() -> None:
    connection = {"address": "10.0.0.1", "clock_offset": -90.0}
    finding = found(HostAnswer(0, {**GOOD, "connection": connection}), "clock")
    assert (finding.status, finding.what) == ("fail", "The clock of me@b is 90.0 s behind that of this machine.")


def test_an_import_that_fails_is_a_failure_with_its_error() -> None:
    finding = found(HostAnswer(0, {**GOOD, "import_error": "torch: OSError: libcudart.so.13 is missing"}), "imports")
    assert finding.status == "fail"
    assert "libcudart.so.13" in finding.what


def test_a_package_that_is_not_installed_is_reported_once() -> None:
    facts = {**GOOD, "versions": {**HERE, "torch": "not installed"}, "import_error": "torch: ModuleNotFoundError"}
    assert [each.check for each in judge(HostAnswer(0, facts)) if each.status == "fail"] == ["versions"]


def test_an_import_that_takes_too_long_is_a_warning() -> None:
    facts = {name: value for name, value in GOOD.items() if name != "import_error"}
    assert found(HostAnswer(None, facts), "imports").status == "warn"


def test_without_an_ssh_program_nothing_is_tried() -> None:
    [finding] = ssh_hosts.check([HOST], ssh=["no-such-ssh"], python="python3", folder="/")
    assert (finding.status, finding.what) == ("fail", "Program not found: 'no-such-ssh'.")
