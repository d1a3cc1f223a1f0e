"""A real SLURM of two nodes, a and b, on one machine: munged, slurmctld and two slurmd.

All of it is its own: configuration, state, key, sockets and ports, so that two can run side by side, next to a SLURM
that the machine may have. Each node pretends to have four CPUs and four GPUs. Jobs in the partition `urgent` take the
nodes from those in `main`, which get a minute's grace and are then requeued.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from system.waiting import DEADLINE

NODES = ("a", "b")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """`environment` leads SLURM's commands to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def command(self, *argv: str) -> str:
        return subprocess.run(argv, env=self.environment, check=True, capture_output=True, text=True).stdout

    def is_quiet(self) -> bool:
        return not self.command("squeue", "--noheader").strip()

    def start(self) -> bool:
        """False where it did not come up: somebody may have taken one of its ports."""
        (self.folder / "slurm.conf").write_text(_configuration(self.folder))
        for number in range(4):
            (self.folder / f"gpu{number}").touch()  # SLURM wants a file for each GPU, and does not open it
        (self.folder / "gres.conf").write_text(f"NodeName=a,b Name=gpu File={self.folder}/gpu[0-3]\n")
        self._daemon("munged", *_munge_options(self.folder))
        if not self._comes_up(self._has_munge):
            return False
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        return self._comes_up(self._is_idle)

    def _daemon(self, name: str, *options: str) -> None:
        program = shutil.which(name, path=_PATH)
        assert program, f"{name} is not installed: tests/system/install.sh installs it"
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen([program, *options], env=self.environment, stdout=log, stderr=log, cwd=self.folder)
            )

    def _has_munge(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.folder / "munge.socket")) == 0

    def _is_idle(self) -> bool:
        seen = subprocess.run(["sinfo", "-hN", "-o%N %T"], env=self.environment, capture_output=True, text=True)
        return {f"{node} idle" for node in NODES} <= set(seen.stdout.splitlines())

    def _comes_up(self, is_up: Callable[[], bool]) -> bool:
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end and all(daemon.poll() is None for daemon in self._daemons):
            if is_up():
                return True
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        self._daemons.clear()
        for process in psutil.process_iter():  # steps of jobs live on without their slurmd, and so do daemons that hang
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    process.kill()


@contextmanager
def running() -> Iterator[Cluster]:
    # Not in pytest's folder: the path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        for _ in range(3):
            cluster = Cluster(Path(folder))
            try:
                if cluster.start():
                    yield cluster
                    return
            finally:
                cluster.stop()
        raise AssertionError(f"SLURM did not start:\n{(Path(folder) / 'daemons.log').read_text()}")


def _munge_options(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    options = [f"--{option}={folder / name}" for option, name in {**files, "seed-file": "munge.seed"}.items()]
    return ["--foreground", "--force", "--num-threads=2", *options]


def _configuration(folder: Path) -> str:
    user = getpass.getuser()
    controller, *nodes = _free_ports(1 + len(NODES))
    lines = "\n".join(
        f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4 Gres=gpu:4 State=UNKNOWN"
        for node, port in zip(NODES, nodes, strict=True)
    )
    return f"""ClusterName=paceline
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MessageTimeout=60
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{lines}
PartitionName=main Nodes=a,b Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=a,b PriorityTier=2 PreemptMode=OFF
"""


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
