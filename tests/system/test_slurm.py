"""A real SLURM of two nodes. A small program stands in for the front end or for a node's launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launcher.backends import slurm_allocation, slurm_job
from paceline.runtime.scheduler_env import SlurmAllocation
from system import curve, slurm_cluster
from system.waiting import DEADLINE, eventually

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="PACELINE_SYSTEM_TESTS is not 1")

# Prints what it finds, as JSON.
SHOW = """
import json, os, sys
from paceline.runtime.scheduler_env import read_allocation
found = read_allocation(os.environ)
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("A"), vars(found)]), flush=True)
"""

# Notes its pid, its order and each signal in a file of its own, until its standard input ends.
NODE = """
import os, signal, sys
log = open(f"{os.environ['SLURMD_NODENAME']}.log", "a", buffering=1)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: log.write(signal.Signals(number).name + "\\n"))
log.write(f"pid {os.getpid()}\\n")
log.write(sys.stdin.readline())
sys.stdin.read()
log.write("end\\n")
"""

# The front end of a job. At a signal it ends the launchers, and requeues the job where that is right.
FRONT = """
import os, signal, sys
from paceline.launcher.backends import slurm_allocation, slurm_job
from paceline.runtime.scheduler_env import read_allocation
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGTERM])
found = read_allocation(os.environ)
print(f"start {found.restarts}", flush=True)
if found.restarts:
    sys.exit(3)
backend = slurm_allocation.SlurmBackend(found, workdir=os.getcwd(), command=[sys.executable, "-c", sys.argv[1]])
for node in range(2):
    backend.start(node, b"order\\n")
terminated = signal.sigwait([signal.SIGUSR2, signal.SIGTERM]) == signal.SIGTERM
backend.stop()
if slurm_allocation.wants_requeue(found, warned=sys.argv[2] == "warned", terminated=terminated):
    slurm_job.requeue(found.job)
    signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[slurm_cluster.Cluster]:
    with slurm_cluster.running() as cluster:
        yield cluster


@pytest.fixture
def cluster(
    running_cluster: slurm_cluster.Cluster, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[slurm_cluster.Cluster]:
    """The cluster without any job, before and after; the working folder is empty."""
    monkeypatch.setenv("SLURM_CONF", running_cluster.environment["SLURM_CONF"])
    yield running_cluster
    if not running_cluster.is_quiet():
        running_cluster.command("scancel", f"--user={os.getuid()}")
    eventually(running_cluster.is_quiet)


@pytest.fixture
def allocated(cluster: slurm_cluster.Cluster) -> SlurmAllocation:
    """Two nodes for this process, as from the shell of salloc."""
    said = subprocess.run(["salloc", "--no-shell", "--nodes=2"], capture_output=True, text=True, check=True).stderr
    granted = re.search(r"Granted job allocation (\d+)", said)
    assert granted
    return SlurmAllocation(granted[1], slurm_cluster.NODES, is_front_end=True)


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def script(command: list[str], request: str = "nodes=2", workdir: Path | None = None, **env: str) -> str:
    parsed = slurm_job.parse(request)
    return slurm_job.batch_script(
        parsed, command, name="test", workdir=str(workdir or Path.cwd()), log="job.log", env=env
    )


def machines(allocated: SlurmAllocation) -> slurm_allocation.SlurmBackend:
    command = [sys.executable, "-c", NODE]
    return slurm_allocation.SlurmBackend(allocated, workdir=str(Path.cwd()), command=command, patience=DEADLINE)


def steps(allocated: SlurmAllocation) -> list[str]:
    listed = subprocess.run(["squeue", "-h", "-s", "-j", allocated.job], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if ".extern" not in line]


def test_a_job_runs_as_requested_and_its_log_and_status_are_returned(
    cluster: slurm_cluster.Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path.cwd() / "a folder; $(touch x) & `y`"
    folder.mkdir()
    hostile = ["it's", "$(touch x)", "a\n#SBATCH --nodes=7\nb", "", "*", "\\"]
    command = [sys.executable, "-c", SHOW + "sys.exit(7)", *hostile]
    job = slurm_job.submit(script(command, "nodes=2,gpus=3,time=10m,cpus=2", folder, A=hostile[2]))
    assert slurm_job.follow(job, folder / "job.log") == 7
    shown = capfd.readouterr()
    assert json.loads(shown.out) == [
        hostile,
        str(folder),
        hostile[2],
        {"job": job, "nodes": ["a", "b"], "is_front_end": True, "gpus": 3, "restarts": 0},
    ]
    assert shown.err.endswith(f"job {job}: failed\n")
    assert [path.name for path in folder.iterdir()] == ["job.log"]


@pytest.mark.nightly
def test_srun_and_salloc_are_distinguished(cluster: slurm_cluster.Cluster) -> None:
    show = [sys.executable, "-c", SHOW]
    shell = json.loads(cluster.command("salloc", "--quiet", "--nodes=2", "--gpus-per-node=2", *show))[3]
    assert (shell["nodes"], shell["is_front_end"], shell["gpus"]) == (["a", "b"], True, 2)
    tasks = cluster.command("srun", "--nodes=2", *show).splitlines()
    assert [json.loads(task)[3]["is_front_end"] for task in tasks] == [False, False]


def test_launchers_get_their_order_and_end_when_let_go(allocated: SlurmAllocation) -> None:
    nodes = machines(allocated)
    for node in (0, 1):
        nodes.start(node, b"x" * 200_000 + b"\n")
    eventually(lambda: all(len(lines(f"{name}.log")) == 2 for name in nodes.names))
    assert nodes.ended() == {}
    nodes.stop()
    for name in nodes.names:
        assert [len(lines(f"{name}.log")[1]), lines(f"{name}.log")[2]] == [200_000, "end"]


def test_launches_in_one_allocation_end_their_own_steps_only(allocated: SlurmAllocation) -> None:
    one, other = machines(allocated), machines(allocated)
    one.start(0, b"one\n")
    other.start(0, b"other\n")
    eventually(lambda: {"one", "other"} <= set(lines("a.log")))
    one._running[0].process.kill()  # a killed srun leaves its step
    eventually(lambda: one.ended() or None)
    one.stop()
    eventually(lambda: "end" in lines("a.log") or len(steps(allocated)) == 1)
    assert len(steps(allocated)) == 1 and other.ended() == {}
    other.stop()
    assert lines("a.log").count("end") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["launcher", "srun"])
def test_a_lost_launcher_is_reported_and_restarted(allocated: SlurmAllocation, victim: str) -> None:
    nodes = machines(allocated)
    for node in (0, 1):
        nodes.start(node, b"first\n")
    eventually(lambda: "first" in lines("b.log"))
    launcher = int(lines("b.log")[0].split()[1])
    os.kill(launcher if victim == "launcher" else nodes._running[1].process.pid, 9)
    told: dict[int, str] = {}
    eventually(lambda: told.update(nodes.ended()) or told)
    assert list(told) == [1]
    eventually(lambda: not Path(f"/proc/{launcher}").exists())  # also where its srun died, and it heard nothing
    nodes.start(1, b"second\n")
    eventually(lambda: "second" in lines("b.log"))
    nodes.stop()
    assert lines("b.log")[-1] == lines("a.log")[-1] == "end"


def refusal(*options: str) -> str:
    """How srun refuses a step."""
    done = subprocess.run(["srun", "--quiet", "--ntasks=1", *options, "true"], capture_output=True, text=True)
    assert done.returncode
    return f"exit status {done.returncode}\n{done.stderr}"


def test_a_busy_node_is_an_accident_and_a_wrong_one_is_not(allocated: SlurmAllocation) -> None:
    job = f"--jobid={allocated.job}"
    hold = ["srun", job, "--exact", "--ntasks=1", "--nodelist=a", "sh", "-c", "echo up; cat"]
    with subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holding:
        assert holding.stdin and holding.stdout and holding.stdout.readline() == b"up\n"
        busy = refusal(job, "--exact", "--nodelist=a", "--immediate=1")
    assert "Requested nodes are busy" in busy and slurm_allocation.is_accident(busy)
    assert not slurm_allocation.is_accident(refusal(job, "--nodelist=nowhere"))
    assert not slurm_allocation.is_accident(refusal("--jobid=999999"))


def submit_front(why: str) -> str:
    job = slurm_job.submit(script([sys.executable, "-c", FRONT, NODE, why], "nodes=2,time=10m"))
    eventually(lambda: all("order" in lines(f"{name}.log") for name in slurm_cluster.NODES))
    return job


@pytest.mark.nightly
def test_a_warning_ends_the_launchers_and_the_job_starts_again(
    cluster: slurm_cluster.Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    job = submit_front("warned")
    cluster.command("scancel", "--batch", "--signal=USR2", job)  # as SLURM does before the time limit
    assert slurm_job.follow(job, Path("job.log")) == 3
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("start")] == ["start 0", "start 1"]
    for name in slurm_cluster.NODES:
        assert lines(f"{name}.log")[2:] == ["end"]


@pytest.mark.nightly
def test_preemption_signals_the_launchers_only_and_the_front_end_requeues(cluster: slurm_cluster.Cluster) -> None:
    job = submit_front("preempted")
    assert not slurm_job.is_preempted(job)
    slurm_job.submit(script(["true"], "nodes=2,partition=urgent,cpus=4"))
    eventually(lambda: all("SIGTERM" in lines(f"{name}.log") for name in slurm_cluster.NODES))
    assert slurm_job.is_preempted(job)
    cluster.command("scancel", "--batch", "--signal=USR2", job)  # the stand-in waits for a signal, and had none so far
    eventually(lambda: slurm_job.job_info(job)["Restarts"] == "1")


@pytest.mark.nightly
def test_a_cancelled_job_is_not_requeued(cluster: slurm_cluster.Cluster) -> None:
    job = submit_front("warned")
    cluster.command("scancel", job)
    assert slurm_job.follow(job, Path("job.log")) != 0
    assert slurm_job.job_info(job)["Restarts"] == "0"


@pytest.mark.nightly
def test_an_error_of_slurm_is_reported_with_its_message(cluster: slurm_cluster.Cluster) -> None:
    with pytest.raises(LaunchError, match=r"(?s)launch\.slurm-refused.*invalid partition"):
        slurm_job.submit(script(["true"], "partition=nowhere"))
    with pytest.raises(LaunchError, match=r"(?s)launch\.slurm-refused.*Invalid job id"):
        slurm_job.requeue("999999")


def test_a_training_has_the_losses_of_plain_python(cluster: slurm_cluster.Cluster) -> None:
    curve.launch(Path.cwd(), "--slurm", "nodes=2,time=10m", env=cluster.environment)
