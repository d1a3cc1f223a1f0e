"""Sweeps over real machines: four behind ssh, a SLURM allocation of two nodes, and a Ray cluster.

What a sweep says of its trials is compared with what the launchers on the machines say: each prints where it is, and
holds a lock of its machine until it ends, so that two trials that share a machine are noticed however short it was.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.run import ledger
from paceline.run.study_folder import StudyFolder
from paceline.tools.search.study import Study
from paceline.tools.search.trial import Trial
from system import namespaces, ray_server, slurm_cluster, ssh_server

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts ssh, SLURM and Ray: set PACELINE_SYSTEM_TESTS=1"
    ),
    pytest.mark.timeout(400),
]
SECONDS = 300
RECIPE = Path(__file__).parents[2] / "recipes" / "mlp.yaml"
HOSTS = ("m1", "m2", "m3", "m4")
# Runs first in every interpreter that finds it. Forked ranks inherit the lock of their launcher, so it is free when the
# last of them has exited.
SITE = """
import fcntl, os, pathlib, sys
if sys.orig_argv[-3:] == ["-m", "paceline", "node"]:
    known = [os.environ.get(name) for name in ("SLURMD_NODENAME", "RAY_RAYLET_PID")]
    by_ssh = os.environ.get("SSH_CONNECTION", "").split()
    machine = by_ssh[2] if by_ssh else next(filter(None, known))
    held = pathlib.Path(__file__).with_name(machine + ".lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(f"alone on {machine}.", file=sys.stderr, flush=True)
    except BlockingIOError:
        print(f"not alone on {machine}.", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH, with which launchers on machines say where they are."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


class Swept:
    """A sweep that has ended, and what its trials left."""

    def __init__(
        self, folder: Path, *options: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> None:
        command = [
            *prefix, sys.executable, "-P", "-m", "paceline", "sweep", str(RECIPE), "--sampler", "random", *options,
            "optimizer.lr=log(1e-4,1e-2)", "train.epochs=1", "data.length=512", "device=cpu",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        self.said = done.stderr
        self.folder = StudyFolder.of(str(folder / "runs" / "mlp-sweep"))
        self.trials = Study.load(self.folder).trials()

    def assert_complete(self, trials: int, *, nodes: int, ranks: int) -> None:
        """All trials completed at the first attempt, with so many ranks on so many nodes."""
        assert [(each.state, each.attempts) for each in self.trials] == [("complete", 1)] * trials, self.said
        for trial in self.trials:
            launched = [
                event for event in ledger.events(self.folder.trial(trial.number)) if event["event"] == "launched"
            ]
            assert [(event["nodes"], event["ranks"]) for event in launched] == [(nodes, ranks)]

    def machines(self, trial: Trial) -> set[str]:
        """Where the launchers of a trial were, without any other."""
        said = self.folder.trial_output(trial.number).read_text()
        assert "not alone on" not in said
        return set(re.findall(r"^alone on (.+)\.$", said, re.MULTILINE))

    def launchers(self, trial: Trial) -> int:
        """How many started on machines for a trial."""
        return self.folder.trial_output(trial.number).read_text().count("alone on ")

    def assert_apart(self) -> None:
        """No two trials were on one machine at a time, by their ledgers."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for trial in self.trials:
            times = [event["time"] for event in ledger.events(self.folder.trial(trial.number))]
            for machine in self.machines(trial):
                spans.setdefault(machine, []).append((times[0], times[-1]))
        for each in spans.values():
            assert all(before[1] < after[0] for before, after in pairwise(sorted(each)))

    def most_at_a_time(self) -> int:
        """By the ledgers of trials."""
        found = [ledger.events(self.folder.trial(trial.number)) for trial in self.trials]
        begun = [(events[0]["time"], 1) for events in found]
        ended = [(events[-1]["time"], -1) for events in found]
        count = most = 0
        for _, change in sorted(begun + ended):
            count += change
            most = max(most, count)
        return most


# Over ssh


class Front:
    """The machine of the sweep, which reaches four others by ssh."""

    def __init__(self, machine: namespaces.Machine, options: Sequence[str], addresses: dict[str, str]) -> None:
        self._prefix = ("ip", "netns", "exec", machine.name)
        self._options = options
        self.addresses = addresses  # by host

    def sweep(self, folder: Path, *options: str) -> Swept:
        hosts = ",".join(f"{name}:1" for name in self.addresses)
        return Swept(folder, "--hosts", hosts, *self._options, *options, prefix=self._prefix)


@pytest.fixture(scope="module")
def front(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    python = site / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH='{site}' exec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    with namespaces.switched(1 + len(HOSTS)) as (machine, *others):
        named = dict(zip(HOSTS, others, strict=True))
        with ssh_server.running_on(named, tmp_path_factory.mktemp("ssh")) as server:
            options = ("--ssh", shlex.join(server.ssh), "--python", str(python))
            yield Front(machine, options, {name: each.address for name, each in named.items()})


@pytest.mark.nightly
def test_each_trial_has_a_host_of_its_own(front: Front, tmp_path: Path) -> None:
    swept = front.sweep(tmp_path, "--trials", "5", "-n", "1")
    swept.assert_complete(5, nodes=1, ranks=1)
    assert {each.slot for each in swept.trials} == set(HOSTS)
    assert all(swept.machines(each) == {front.addresses[each.slot]} for each in swept.trials)
    swept.assert_apart()


@pytest.mark.nightly
def test_a_trial_with_more_ranks_than_a_host_has_takes_two_of_them(front: Front, tmp_path: Path) -> None:
    swept = front.sweep(tmp_path, "--trials", "2", "-n", "2")
    swept.assert_complete(2, nodes=2, ranks=2)
    assert {each.slot for each in swept.trials} == {"m1; m2", "m3; m4"}
    for trial in swept.trials:
        assert swept.machines(trial) == {front.addresses[name] for name in trial.slot.split("; ")}
    swept.assert_apart()


# In a SLURM allocation


def refuse_once(folder: Path) -> str:
    """A PATH on which the first `srun` refuses a step, as SLURM's does while another one completes."""
    srun = folder / "srun"
    srun.write_text(
        f"""#!/bin/sh
if mkdir '{folder}/refused' 2>/dev/null; then
    echo 'srun: error: Unable to create step for job 1: Job/step already completing or completed' >&2
    exit 1
fi
exec '{shutil.which("srun")}' "$@"
"""
    )
    srun.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_each_trial_has_a_node_of_the_allocation(site: Path, tmp_path: Path) -> None:
    with slurm_cluster.running() as cluster:
        allocate = ("salloc", "--quiet", "--nodes=2")
        env = {**cluster.environment, "PYTHONPATH": str(site), "PATH": refuse_once(tmp_path)}
        swept = Swept(tmp_path, "--trials", "3", "-n", "2", prefix=allocate, env=env)
    assert (tmp_path / "refused").exists()
    swept.assert_complete(3, nodes=1, ranks=2)
    assert {each.slot for each in swept.trials} == set(slurm_cluster.NODES)
    assert all(swept.machines(each) == {each.slot} for each in swept.trials)
    swept.assert_apart()


# On Ray


@pytest.mark.nightly
def test_ray_places_trials(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))  # of Ray's nodes: launchers inherit it from them
    with ray_server.running() as env:
        swept = Swept(tmp_path, "--ray", "auto", "--parallel", "2", "--trials", "2", "-n", "1", env=env)
    swept.assert_complete(2, nodes=1, ranks=1)
    assert {each.slot for each in swept.trials} == {"Ray"}
    assert all(swept.launchers(each) == 1 for each in swept.trials)
    assert swept.most_at_a_time() <= 2
