"""What environments say of a launcher's place among several. The variables are as the real programs set them."""

from __future__ import annotations

import os
import shlex

import pytest

from paceline.config.launch import NodeRange
from paceline.errors import LaunchError, PacelineError, WorldError
from paceline.launcher.cluster.node_env import (
    NodeEnvironment,
    first_rank_environment,
    read_node_environment,
    reject_exported_rank,
)

TRAIN_JOB = {  # Kubeflow Trainer 2
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "job-node-0-1",
}
PYTORCH_JOB = {  # Kubeflow's training operator 1.5, without PET_*
    "MASTER_ADDR": "mnist-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "16",
    "RANK": "4",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "mnist-worker-3",
}
SRUN = {  # srun --ntasks-per-node=1 paceline launch …
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}
MPIRUN = {  # mpirun --map-by ppr:1:node paceline launch …
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "head",
}
GUIDE = {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"}  # 4 GPUs on each of 2


def test_without_variables_there_is_no_node_environment() -> None:
    assert read_node_environment({}) is None
    assert read_node_environment(GUIDE) is None


def test_torchruns_variables_are_understood() -> None:
    found = read_node_environment(TRAIN_JOB)
    assert found == NodeEnvironment(NodeRange(2, 2), 1, "job-node-0-0.job", 29400, 4, "PET_* variables")
    assert found.describe() == "nodes: 2, this is node 1 (from PET_* variables)"


@pytest.mark.parametrize(
    ("text", "ranks"), [("auto", None), ("gpu", None), ("", None), ("3", 3), ("cpu", os.cpu_count())]
)
def test_torchruns_names_for_a_number_of_ranks_are_understood(text: str, ranks: int | None) -> None:
    found = read_node_environment({**TRAIN_JOB, "PET_NPROC_PER_NODE": text})
    assert found is not None and found.ranks == ranks


def test_an_elastic_job_has_a_range_of_nodes_and_no_number_for_each() -> None:
    found = read_node_environment(
        {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "worker-0:29400", "PET_NPROC_PER_NODE": "2"}
    )
    assert found == NodeEnvironment(NodeRange(1, 4), None, "worker-0", 29400, 2, "PET_* variables")
    assert found.describe() == "nodes: 1:4 (from PET_* variables)"


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [("head", "head", 29500), ("head:1", "head", 1), ("[fd00::1]:40", "fd00::1", 40), ("[fd00::1]", "fd00::1", 29500)],
)
def test_an_endpoint_may_be_an_address_of_any_kind(endpoint: str, host: str, port: int) -> None:
    found = read_node_environment({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": endpoint})
    assert found is not None and (found.master_host, found.master_port) == (host, port)


def test_several_nodes_without_an_address_have_a_code() -> None:
    found = read_node_environment({"PET_NNODES": "2", "PET_NODE_RANK": "0"})
    assert found is not None
    with pytest.raises(LaunchError) as caught:
        found.endpoint()
    assert caught.value.code == "launch.no-master"


def test_a_pytorch_job_counts_pods() -> None:
    assert read_node_environment(PYTORCH_JOB) == NodeEnvironment(
        NodeRange(16, 16), 4, "mnist-master-0", 23456, None, "the PyTorchJob's RANK"
    )
    reject_exported_rank(PYTORCH_JOB, 4, ["launch", "train.py"])


def test_torchruns_variables_count_more_than_a_pytorch_jobs() -> None:
    """Newer operators set both, and WORLD_SIZE is then pods × ranks."""
    both = {**PYTORCH_JOB, "PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "9"}
    assert read_node_environment(both) == NodeEnvironment(NodeRange(4, 4), 1, "m", 9, None, "PET_* variables")
    reject_exported_rank(both, 2, ["launch", "train.py"])


def test_one_task_of_srun_on_each_machine_is_one_launcher_on_each() -> None:
    found = read_node_environment(SRUN)
    assert found is not None and found.describe() == "nodes: 3, this is node 2 (from srun)"
    assert found.master_host == "n1" and 20000 <= found.master_port < 30000


def test_one_process_of_mpirun_on_each_machine_is_one_launcher_on_each() -> None:
    assert read_node_environment(MPIRUN) == NodeEnvironment(NodeRange(2, 2), 1, "head", 29500, None, "mpirun")


@pytest.mark.parametrize(
    "environment",
    [
        {**SRUN, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"},
        {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ],
)
def test_several_launchers_on_a_machine_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="run without `paceline launch`") as caught:
        read_node_environment(environment)
    assert caught.value.code == "launch.two-worlds"


@pytest.mark.parametrize("environment", [TRAIN_JOB, PYTORCH_JOB, SRUN, MPIRUN, GUIDE])
def test_a_rank_does_not_take_its_launchers_contract_for_its_own(environment: dict[str, str]) -> None:
    rank = {**environment, "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_node_environment(rank) is None
    assert first_rank_environment(rank, 4) is None
    reject_exported_rank(rank, 4, ["launch", "train.py"])


@pytest.mark.parametrize(
    "said",
    [
        {"PET_NNODES": "two"},
        {"PET_NNODES": "4:1"},
        {"PET_NNODES": "0"},
        {"PET_NODE_RANK": "2"},
        {"PET_NODE_RANK": "-1"},
        {"PET_NPROC_PER_NODE": "some"},
        {"PET_NPROC_PER_NODE": "0"},
        {"PET_MASTER_PORT": "70000"},
        {"PET_MASTER_ADDR": "-oProxyCommand=reboot"},
        {"PET_MASTER_ADDR": "a b;c"},
        {"PET_RDZV_ENDPOINT": "a:b:c"},
        {"PET_RDZV_ENDPOINT": "$(reboot):1"},
    ],
)
def test_a_contract_that_makes_no_sense_has_a_code(said: dict[str, str]) -> None:
    with pytest.raises(WorldError) as caught:
        read_node_environment({**TRAIN_JOB, **said})
    assert caught.value.code == "world.bad-environment"


def test_an_exported_first_rank_gives_the_machine_its_place() -> None:
    assert first_rank_environment(GUIDE, 4) == NodeEnvironment(
        NodeRange(2, 2), 1, "10.1.1.1", 29500, 4, "RANK, as a first rank"
    )
    first = first_rank_environment({**GUIDE, "RANK": "0"}, 4)
    assert first is not None and first.node_rank == 0


@pytest.mark.parametrize("said", [{"RANK": "0", "WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_an_exported_rank_on_one_machine_changes_nothing(said: dict[str, str]) -> None:
    assert first_rank_environment({**GUIDE, **said}, 4) is None
    reject_exported_rank({**GUIDE, **said}, 4, ["launch", "train.py"])


@pytest.mark.parametrize(("rank", "world"), [("4", "9"), ("3", "8"), ("1", "2"), ("0", "2")])
def test_a_rank_that_is_not_the_first_of_its_machine_has_a_code(rank: str, world: str) -> None:
    with pytest.raises(LaunchError) as caught:
        first_rank_environment({**GUIDE, "RANK": rank, "WORLD_SIZE": world}, 4)
    assert caught.value.code == "launch.first-rank"


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ({}, "--nodes 2 --node-rank 1 --master 10.1.1.1:29500"),
        ({"RANK": "0"}, "--nodes 2 --node-rank 0 --master 10.1.1.1:29500"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "--nodes 2 --node-rank 1 --master 10.1.1.1:29500"),  # counts machines
        ({"MASTER_ADDR": "fd00::1", "MASTER_PORT": "7"}, "--nodes 2 --node-rank 1 --master '[fd00::1]:7'"),
    ],
)
def test_two_worlds_are_refused_with_the_right_command(said: dict[str, str], right: str) -> None:
    with pytest.raises(PacelineError) as caught:
        reject_exported_rank({**GUIDE, **said}, 4, ["launch", "-n", "4", "train.py", "--name", "a b"])
    assert caught.value.code == "launch.two-worlds"
    assert f"fix: paceline launch {right} -n 4 train.py --name 'a b'\n" in str(caught.value)


def test_an_address_with_shell_characters_is_quoted_in_the_command() -> None:
    with pytest.raises(PacelineError) as caught:
        reject_exported_rank({**GUIDE, "MASTER_ADDR": "a; reboot"}, 4, ["launch", "train.py"])
    command = caught.value.fix.splitlines()[0]
    assert shlex.split(command)[7] == "a; reboot:29500"
