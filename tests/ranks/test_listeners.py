"""On a single machine, nothing listens beyond loopback, however ranks are started.

The machine's name resolves to an address of the network here, if the test may rename it: gloo would listen there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch.distributed as torch_dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import nodes
import paceline
import tiny
from listening import listeners
from paceline.runtime.network import LOOPBACK

_NEW_UTS_NAMESPACE = 0x04000000  # CLONE_NEWUTS
_TOKEN = "the token of these tests"


def body() -> None:
    """Train a step, and wait until the test has looked."""
    trainer = tiny.classifier_trainer(run=False)
    trainer.train(tiny.blobs(32), max_steps=1)
    Path(f"ready-{torch_dist.get_rank()}").touch()
    nodes.eventually(Path("go").exists)


def own_address() -> str | None:
    """An address of this machine other than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return None


def _enter(folder: Path, variables: Mapping[str, str], run: Callable[[], object]) -> None:
    os.chdir(folder)
    sys.stdout = sys.stderr = (folder / f"said-{os.getpid()}").open("w")
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(_NEW_UTS_NAMESPACE) == 0 and (address := own_address()):
        socket.sethostname(address)
    os.environ.update(variables, PACELINE_TOKEN=_TOKEN)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    run()


def start(folder: Path, run: Callable[[], object] = body, **variables: object) -> BaseProcess:
    texts = {name: str(value) for name, value in variables.items()}
    process = get_context("fork").Process(target=_enter, args=(folder, texts, run))
    process.start()
    return process


def mpirun(folder: Path) -> list[BaseProcess]:
    port = nodes.reserve_ports()
    own = {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "MASTER_PORT": port}
    ranks = ({"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in range(2))
    return [start(folder, **own, **rank) for rank in ranks]


def srun(folder: Path) -> list[BaseProcess]:
    job = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_NODEID": 0, "SLURM_STEP_NODELIST": "here"}
    own = {**job, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": nodes.reserve_ports()}
    return [start(folder, **own, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in range(2)]


def exported(folder: Path, host: str = LOOPBACK, **variables: object) -> list[BaseProcess]:
    own = {"WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": nodes.reserve_ports(), **variables}
    return [start(folder, RANK=rank, **own) for rank in range(2)]


def exported_with_own_address(folder: Path) -> list[BaseProcess]:
    return exported(folder, own_address() or LOOPBACK, LOCAL_WORLD_SIZE=2)


def elastic_agent(folder: Path) -> list[BaseProcess]:
    """As torchrun starts ranks. Its own process opens the store, which is torch's affair."""
    config = LaunchConfig(
        1, 1, 2, rdzv_backend="static", rdzv_endpoint=f"{LOOPBACK}:{nodes.reserve_ports()}", rdzv_configs={"rank": 0},
        run_id="none", start_method="fork", monitor_interval=0.05,
    )  # fmt: skip
    return [start(folder, lambda: elastic_launch(config, body)())]


def launched_function(folder: Path) -> list[BaseProcess]:
    return [start(folder, lambda: paceline.launch(body, ranks=2))]


def two_nodes(folder: Path, host: str = LOOPBACK) -> list[BaseProcess]:
    port, own = nodes.reserve_ports(), {"WORLD_SIZE": 2, "MASTER_ADDR": host}
    return [
        start(folder, lambda: paceline.launch(body, ranks=1), RANK=rank, MASTER_PORT=port, **own) for rank in range(2)
    ]


def two_nodes_at_own_address(folder: Path) -> list[BaseProcess]:
    return two_nodes(folder, own_address() or LOOPBACK)


WAYS = {
    launched_function: (), two_nodes: (), mpirun: (), srun: (), exported: (), exported_with_own_address: (),
    elastic_agent: ("agent",), two_nodes_at_own_address: ("coordinator",),
}  # fmt: skip


@pytest.mark.parametrize(("way", "others"), WAYS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_only_loopback_is_open_on_one_machine(
    tmp_path: Path, way: Callable[[Path], list[BaseProcess]], others: tuple[str, ...]
) -> None:
    processes = way(tmp_path)
    try:
        nodes.eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2 or not all(p.is_alive() for p in processes))
        own = {each.pid: each for each in psutil.Process().children(recursive=True)}
        found = [each for each in listeners() if each.pid in own]
    finally:
        (tmp_path / "go").touch()
        for process in processes:
            process.join(60)
            process.kill()
    said = "".join(path.read_text() for path in tmp_path.glob("said-*"))
    assert [process.exitcode for process in processes] == [0] * len(processes), said
    assert found, "the ranks are connected, so something listens"
    # The port of the coordinator is where --master says, and protected by the token.
    assert len({each.port for each in found if not each.is_loopback}) <= len(others), found
