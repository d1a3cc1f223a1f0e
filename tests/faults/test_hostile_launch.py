"""Host names, paths, arguments and environments made by somebody who means harm: 1,000 cases from ten seeds.

Each goes through the reading of hosts and the building of the ssh command. What is accepted is really run, by a program
in ssh's place that does what ssh and sshd do with the command: give it to a shell. Nothing but the recorder, which
stands in for the launcher of the host, may run, and it must get exactly what was meant.
"""

from __future__ import annotations

import random
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import nodes
from paceline.config.launch import Endpoint, LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.backends.ssh import Host, SshBackend, read_hosts, remote_command
from paceline.launcher.cluster import fingerprint
from paceline.launcher.cluster.fingerprint import NodeOrder
from paceline.launcher.dispatch import dispatch
from paceline.launcher.workload import Target, Workload
from samples import sample

CASES_OF_A_SEED = 100
RUN = "touch canary"
# What any shell leaves alone between quotes; the others are refused in a command, but may be in the order.
QUOTABLE = [
    f"$({RUN})", f"`{RUN}`", f";{RUN};", f"&& {RUN} &&", f"|{RUN}", f"& {RUN} &", "' '", "'", '"', ">canary", "$HOME",
    "${IFS}", "-oProxyCommand=touch", "--", "-", " ", "*", "?", "~", "#", "%h", "{a,b}", "(", ")", "=", "@", ":", ",",
    "[::1]", "slots=4", "ü", "漢字", "\u202e", "\ufeff", "\udc80", "a", "b", "node-1",
]  # fmt: skip
OTHERS = ["\0", "\n", f"\n{RUN}\n", "\r", "\t", "\\", "\\'", "!", "!!", "\x1b[2J", "\x7f", "\ud800x", "x" * 5000]
VARIABLE_LETTERS = set(string.ascii_letters + string.digits + "_")
HOST_LETTERS = set(string.ascii_letters + string.digits + "._-@:%")
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
printf '%s' "$2" >"$RECORDS/host"
exec /bin/sh -c "$3"
"""
RECORDER = """#!/bin/sh
pwd -P >"$RECORDS/folder"
printf '%s\\0' "$@" >"$RECORDS/arguments"
exec head -n 1 >"$RECORDS/order"
"""


def text(chance: random.Random, *, quotable: bool) -> str:
    return "".join(chance.choices(QUOTABLE if quotable else QUOTABLE + OTHERS, k=chance.randint(1, 5)))


@dataclass(frozen=True)
class Case:
    hosts: str
    line: str  # of a hostfile
    folder: str
    arguments: list[str]
    order: NodeOrder

    @classmethod
    def draw(cls, chance: random.Random) -> Case:
        quotable = chance.random() < 0.6
        beginning = chance.choice(["", "node-1", "me@node-1", "node-1:", "[::1]"])
        endings = [text(chance, quotable=False), "", ".b", ":4", ",node-2:2"]
        return cls(
            hosts=beginning + chance.choice(endings),
            line=beginning + chance.choice(endings),
            folder=text(chance, quotable=quotable),
            arguments=[text(chance, quotable=quotable) for _ in range(chance.randint(0, 3))],
            order=_order(chance),
        )


def _order(chance: random.Random) -> NodeOrder:
    """What travels through standard input, where everything is allowed."""
    script, value, *arguments = (text(chance, quotable=False) for _ in range(4))
    spec = LaunchSpec(ranks=1, run=script, env={"NAME": value})
    target = Target("script", script, tuple(arguments))
    return NodeOrder(0, "token", (Endpoint("node-0", 1),), 1, spec, target, recipe=None, folder="/")


class Place:
    """Folders for one seed, and the programs that stand in for ssh and for the interpreter of the host."""

    def __init__(self, root: Path) -> None:
        self.records, self.work = root / "records", root / "work"
        self.ssh, self.recorder, self.hostfile = root / "ssh", root / "recorder", root / "hostfile"
        self.records.mkdir()
        self.work.mkdir()
        for program, script in ((self.ssh, SSH), (self.recorder, RECORDER)):
            program.write_text(script)
            program.chmod(0o755)

    def folder(self, name: str) -> str:
        """The path of a working folder of that name, made where a file system can hold it."""
        path = self.work / f"_{name}"
        try:
            path.mkdir(exist_ok=True)
        except (OSError, ValueError):
            assert set(name) & {"\0", "\ud800"} or len(name) > 255
        return str(path)

    def recorded(self, name: str) -> bytes:
        return (self.records / name).read_bytes()


def hosts_of(case: Case, place: Place) -> list[Host]:
    """Those that were accepted, from the command line and the hostfile; each refusal has a code."""
    place.hostfile.write_bytes(case.line.encode(errors="surrogatepass"))
    accepted: list[Host] = []
    for written in (case.hosts, str(place.hostfile)):
        try:
            accepted += read_hosts(written)
        except LaunchError as error:
            assert error.code in {"launch.bad-hosts", "launch.no-hostfile", "launch.same-host-twice"}
    return accepted


def run(case: Case, host: Host, place: Place, command: str) -> None:
    backend = SshBackend([host], command, ssh=(str(place.ssh),), patience=60.0)
    backend.start(0, case.order.line())
    ended = nodes.eventually(backend.ended)
    assert ended == {0: "exit status 0"}
    assert place.recorded("host").decode() == host.name
    with (place.records / "order").open("rb", buffering=0) as file:
        assert fingerprint.read(file.fileno()) == case.order


@pytest.mark.parametrize("seed", range(sample(5, 10)))
def test_nothing_but_the_launcher_runs(in_memory: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance, place, seen = random.Random(seed), Place(in_memory), Counter[str]()
    monkeypatch.setenv("RECORDS", str(place.records))
    monkeypatch.chdir(place.work)
    for _ in range(CASES_OF_A_SEED):
        case = Case.draw(chance)
        hosts = hosts_of(case, place)
        assert all(set(host.name) <= HOST_LETTERS and host.name[0] not in "-@.%" for host in hosts)
        seen["host"] += bool(hosts)
        folder = place.folder(case.folder)
        try:
            command = remote_command(folder, [str(place.recorder), *case.arguments])
        except LaunchError as error:
            assert error.code == "launch.unsafe-path"
            seen["refused"] += 1
            continue
        run(case, (hosts or [Host("node-1")])[0], place, command)
        seen["run"] += 1
        assert place.recorded("folder") == str(Path(folder).resolve()).encode(errors="surrogateescape") + b"\n"
        sent = b"".join(argument.encode(errors="surrogateescape") + b"\0" for argument in case.arguments)
        assert place.recorded("arguments") == (sent or b"\0")  # printf writes its format once where there is nothing
    assert not [path for path in in_memory.rglob("*canary*") if path.name == "canary"]
    assert seen["run"] >= 30 and seen["refused"] >= 15 and seen["host"] >= 30, seen


def test_a_variable_has_a_plain_name_or_is_refused() -> None:
    """Where the name is accepted, the host that is none ends the launch."""
    chance, seen = random.Random(0), Counter[str]()
    for _ in range(200):
        name = chance.choice(["A", "a_1", "_"]) + chance.choice(["", text(chance, quotable=False)])
        with pytest.raises(LaunchError) as caught:
            dispatch(Workload(lambda: None), LaunchSpec(ranks=1, env={name: "x"}, hosts="-"), [])
        seen[caught.value.code] += 1
        assert caught.value.code == ("launch.bad-hosts" if set(name) <= VARIABLE_LETTERS else "launch.bad-variable")
    assert min(seen["launch.bad-hosts"], seen["launch.bad-variable"]) >= 50, seen
