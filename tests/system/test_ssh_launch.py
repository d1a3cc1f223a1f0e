"""`paceline launch --hosts` from end to end: a real ssh server with two host names, one rank on each."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from own_project import write_project
from system import ssh_server
from system.ssh_server import SshServer
from system.waiting import DEADLINE, eventually, is_gone

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts an ssh server: set PACELINE_SYSTEM_TESTS=1"
)
# Says who it is, and then does what its first argument says.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import psutil
rank, task = os.environ["RANK"], sys.argv[1]
def tell(name, **words):
    Path(f"{name}-{rank}.partial").write_text(json.dumps(words))
    os.rename(f"{name}-{rank}.partial", f"{name}-{rank}")
def interrupted(number, frame):
    tell("saved")
    sys.exit(128 + number)
signal.signal(signal.SIGINT, interrupted)
tell("here", pid=os.getpid(), launcher=psutil.Process().parent().ppid(), arguments=sys.argv[1:],
     folder=os.getcwd(), world=os.environ["WORLD_SIZE"], host=os.environ["SSH_CONNECTION"].split()[2])
while task != "end" and not (task == "fail" and rank == "1" and os.path.exists("here-0")):
    time.sleep(0.01)
if task == "fail":
    raise ValueError("this one fails")
print("all is well")
"""


class Launched:
    def __init__(self, server: SshServer, folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> None:
        self.folder, self.config = folder, server.ssh[-1]
        (folder / "script.py").write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "launch", "--hosts", "node-a:1,node-b:1", "--ssh",
             shlex.join([*server.ssh, *options]), "script.py", *arguments],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ranks(self) -> list[dict[str, Any]]:
        """What each says of itself, once both are there."""
        paths = [self.folder / f"here-{rank}" for rank in range(2)]
        eventually(lambda: self.process.poll() is not None or all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> tuple[int, str]:
        """Its exit status and what it said."""
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out + err

    def leaves_nothing(self) -> bool:
        ssh = [each for each in psutil.process_iter(["cmdline"]) if self.config in (each.info["cmdline"] or ())]
        return not ssh and all(is_gone(rank["pid"]) and is_gone(rank["launcher"]) for rank in self.ranks())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server.running(tmp_path_factory.mktemp("ssh")) as server:
        yield server


@pytest.fixture
def launched(server: SshServer, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def launch(*arguments: str, options: tuple[str, ...] = ()) -> Launched:
        folder = tmp_path / "it's a $(touch canary); folder"
        folder.mkdir()
        started.append(Launched(server, folder, *arguments, options=options))
        return started[-1]

    yield launch
    for each in started:
        each.process.kill()
        each.process.communicate()
    assert not list(tmp_path.rglob("canary"))


def test_the_ranks_of_two_hosts_are_one_world(launched: Callable[..., Launched]) -> None:
    arguments = ["end", "--x", "a b", "$(touch canary)", "`touch canary`;", "'\"\\!\n", "-oProxyCommand=x", "ü"]
    launch = launched(*arguments)
    status, said = launch.end()
    assert status == 0, said
    assert [(rank["host"], rank["world"]) for rank in launch.ranks()] == [("127.0.0.1", "2"), ("127.0.0.2", "2")]
    assert [rank["arguments"] for rank in launch.ranks()] == [arguments] * 2
    assert [rank["folder"] for rank in launch.ranks()] == [str(launch.folder)] * 2
    assert said.count("all is well") == 1
    assert launch.leaves_nothing()


@pytest.mark.nightly
def test_a_recipe_with_own_code_trains_and_is_evaluated_on_two_hosts(server: SshServer, tmp_path: Path) -> None:
    write_project(tmp_path)
    hosts = ["--hosts", "node-a:1,node-b:1", "--ssh", shlex.join(server.ssh)]
    said = []
    for command in (["train"], ["evaluate", "--from", "recipe", "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *command, "project/recipe.yaml", *hosts],
            cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    records = map(json.loads, (tmp_path / "runs" / "recipe" / "metrics.jsonl").read_text().splitlines())
    trained = [record for record in records if "evaluation" in record][-1]
    evaluated = json.loads(said[1])["metrics"]
    assert evaluated == pytest.approx({name: trained[name] for name in evaluated}, rel=1e-6)


@pytest.mark.nightly
def test_a_rank_that_fails_ends_all_and_is_shown_once(launched: Callable[..., Launched]) -> None:
    launch = launched("fail")
    status, said = launch.end()
    assert status == 1, said
    assert said.count("ValueError: this one fails") == 1
    assert launch.leaves_nothing()


@pytest.mark.nightly
def test_ctrl_c_lets_the_ranks_save_and_ends_all(launched: Callable[..., Launched]) -> None:
    launch = launched("wait")
    launch.ranks()
    launch.process.send_signal(signal.SIGINT)
    status, said = launch.end()
    assert status == 128 + signal.SIGINT, said
    assert all((launch.folder / f"saved-{rank}").exists() for rank in range(2))
    assert launch.leaves_nothing()


@pytest.mark.nightly
def test_a_front_end_that_is_killed_leaves_nothing_on_the_hosts(launched: Callable[..., Launched]) -> None:
    launch = launched("wait")
    launch.ranks()
    launch.process.kill()
    eventually(launch.leaves_nothing)


@pytest.mark.nightly
def test_an_unreachable_host_is_named_with_the_message_of_ssh(launched: Callable[..., Launched]) -> None:
    status, said = launched("end", options=("-p", "1")).end()
    assert status != 0
    assert "[launch.node-failed]" in said
    assert re.search("The launcher on node-[ab] exited before it joined", said)
    assert "ssh could not log in" in said
    assert "Connection refused" in said
