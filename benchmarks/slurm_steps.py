"""Many short launches in one SLURM allocation, several at a time on each of its two nodes, which are used again at
once.

    PYTHONPATH=tests python benchmarks/slurm_steps.py 500

Trials of sweeps are launched by the real front end with srun, on a SLURM of its own (tests/system/slurm_cluster.py). A
launcher that trains nothing stands in for `paceline node`, which would import torch: it joins, and reports that its
rank has ended well, or with status 1 in every seventh trial. Exits with status 1 if a trial has another verdict, or if
a step is left. Prints how long it took, and how many launchers were started again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.config.launch import LaunchSpec, NodeRange
from paceline.launcher.backends.slurm_allocation import SlurmBackend
from paceline.launcher.cluster import frontend
from paceline.launcher.workload import Workload
from paceline.run import study_folder
from paceline.run.folder import RunFolder
from paceline.runtime.scheduler_env import SlurmAllocation, read_allocation
from paceline.tools.search import recipe_trials
from paceline.tools.search.placement import Machine, Pool, TrialSlot
from paceline.tools.search.results import Trial
from paceline.tools.search.scheduler import Sweep
from paceline.tools.search.study import Study
from system import slurm_cluster

_TRIALS = 25  # of a study: reading it takes longer with each
_BAD = 7  # every seventh trial fails
NODE = """
import select, socket, sys, time
from paceline.config.launch import NodeRange
from paceline.launcher.cluster import channel, fingerprint, membership

order = fingerprint.read(0)
link = channel.connect(fingerprint.reachable(order), order.token)
link.send(membership.JoinRequest(socket.gethostname(), 1, NodeRange(1, 1), order.node, {}).to_message())
while True:
    select.select([link], [], [], 0.5)
    link.send({"kind": "heartbeat"})
    for message in link.receive():
        if message["kind"] == "open":
            link.send({"kind": "opened", "folder": None})
        elif message["kind"] == "start":
            exited = {"rank": 0, "node": 0, "code": int(sys.argv[1]), "time": time.time()}
            link.send({"kind": "exited", "now": time.time(), "exits": [exited], "oom_killed": [], "suspects": {}})
        elif message["kind"] == "end":
            sys.exit(message["status"])
"""


def is_bad(number: int) -> bool:
    return number % _BAD == _BAD - 1


class Launches:
    """Trials that are launches in the allocation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def body(self, trial: Trial, folder: RunFolder, slot: TrialSlot, fraction: float | None) -> int:
        allocation = read_allocation(os.environ)
        assert allocation is not None
        command = [sys.executable, "-c", NODE, str(int(is_bad(trial.number)))]
        backend = SlurmBackend(allocation, workdir=str(self._folder), command=command)
        spec = LaunchSpec(nodes=NodeRange(1, 1), run=False)
        status = frontend.launch_on(backend, Workload(lambda: None), spec, [1]).status
        if status == 0:
            study_folder.append_evaluation(folder, 1, "loss", 1.0)
        return status


def study(folder: Path, number: int, trials: int, at_a_time: int) -> tuple[int, list[str]]:
    """A sweep: how many launchers were started again, and what is wrong with its trials."""
    nodes = [Machine(name, tuple(map(str, range(at_a_time)))) for name in slurm_cluster.NODES]
    found = Study.open(str(folder / f"study-{number}"), {"x": "uniform(0, 1)"}, trials=trials, sampler="random")
    Sweep(found, Pool(nodes, 1, 2 * at_a_time, "slurm"), Launches(folder)).run()
    again, wrong = 0, []
    for trial in found.trials():
        said = found.folder.trial_output(trial.number).read_text()
        again += said.count("starting it again")
        expected = "failed" if is_bad(trial.number) else "complete"
        if (trial.state, trial.attempts) != (expected, 1):
            wrong.append(f"trial {trial.number} of study {number}: {trial.state} at attempt {trial.attempts}\n{said}")
    return again, wrong


def allocate(cluster: slurm_cluster.Cluster) -> SlurmAllocation:
    os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
    said = subprocess.run(["salloc", "--no-shell", "--nodes=2"], capture_output=True, text=True, check=True).stderr
    granted = re.search(r"Granted job allocation (\d+)", said)
    assert granted
    os.environ.update(SLURM_JOB_ID=granted[1], SLURM_JOB_NODELIST=",".join(slurm_cluster.NODES))
    return SlurmAllocation(granted[1], slurm_cluster.NODES, is_front_end=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launches", type=int, nargs="?", default=100)
    parser.add_argument("--at-a-time", type=int, default=2, help="on each node")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no study is started")
    options = parser.parse_args()
    recipe_trials.preload()  # torch, once for all trials
    began, done, again, wrong, number = time.monotonic(), 0, 0, list[str](), 0
    with tempfile.TemporaryDirectory() as name, slurm_cluster.running() as cluster:
        allocation = allocate(cluster)
        while done < options.launches and time.monotonic() - began < options.seconds:
            trials = min(_TRIALS, options.launches - done)
            found = study(Path(name), number, trials, options.at_a_time)
            done, again, wrong, number = done + trials, again + found[0], wrong + found[1], number + 1
        left = cluster.command("squeue", "-h", "-s", "-j", allocation.job).split("\n")
        left = [line for line in left if "paceline" in line]
        cluster.command("scancel", allocation.job)
    print("\n".join([*wrong, *left]))
    seconds = time.monotonic() - began
    verdicts = f"{len(wrong)} wrong verdicts, {again} launchers started again, {len(left)} steps left"
    print(f"{done} launches in {seconds:.0f} s: {verdicts}")
    return int(bool(wrong or left))


if __name__ == "__main__":
    raise SystemExit(main())
