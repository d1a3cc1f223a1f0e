"""Who a process is, under torchrun, mpirun and srun. The variables are as the real programs set them."""

from __future__ import annotations

import os
import socket
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from paceline.errors import WorldError
from paceline.run.folder import RunFolder
from paceline.runtime import process_group
from paceline.runtime.environment import (
    RankInfo,
    incomplete_rank,
    is_on_one_machine,
    log_folder,
    read_exported,
    read_rank_info,
    rendezvous_address,
    restart_count,
    run_folder,
    suspect_step,
)

OPEN_MPI = {  # Open MPI 4.1: mpirun -n 2
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "569049089",
    "PMIX_NAMESPACE": "569049089",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}  # MPICH 4.0
BATCH = {  # a batch script of a job with 2 nodes and 6 tasks
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "6",
    "SLURM_TASKS_PER_NODE": "4,2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = {  # the last task of srun in that script
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [(OPEN_MPI, RankInfo(1, 2, 1, 2, 1)), (HYDRA, RankInfo(1, 2, 1, 2, 1)), (SRUN, RankInfo(5, 6, 1, 2, 2))],
)
def test_tasks_of_mpirun_and_srun_are_ranks(environment: dict[str, str], place: RankInfo) -> None:
    assert read_rank_info(environment) == place
    assert read_rank_info(environment).nodes == place.reported_nodes  # type: ignore[union-attr]


def test_what_a_launcher_of_ranks_says_counts_more() -> None:
    told = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_info({**OPEN_MPI, **SRUN, **told}) == RankInfo(3, 8, 1, 2)


def test_mpirun_inside_a_slurm_job_counts_more_than_the_srun_that_it_starts_its_helpers_with() -> None:
    assert read_rank_info({**SRUN, **OPEN_MPI}) == RankInfo(1, 2, 1, 2, 1)


def test_srun_that_serves_mpi_programs_is_still_srun() -> None:
    assert read_rank_info({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}) == RankInfo(5, 6, 1, 2, 2)


@pytest.mark.parametrize(
    "environment",
    [
        BATCH,
        {**SRUN, "SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {**SRUN, "SLURM_STEP_ID": "batch"},
        {**SRUN, **ONE_TASK},  # srun --pty bash; SLURM_NTASKS is still 6
        {**SRUN, "SLURM_PTY_PORT": "40001"},  # srun -n 6 --pty bash
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
)
def test_a_lone_process_is_one_rank_whatever_the_job_has(environment: dict[str, str]) -> None:
    assert read_rank_info(environment) is None
    assert rendezvous_address(environment) is None


def test_machines_with_different_numbers_of_ranks_agree_on_how_many_there_are() -> None:
    def told(local_world: int) -> dict[str, str]:
        return {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local_world)}

    places = [read_rank_info({**told(number), "GROUP_WORLD_SIZE": "2"}) for number in (4, 2)]
    assert [place.nodes for place in places if place] == [2, 2]


def test_ranks_started_by_hand_are_counted_on_their_machine_where_its_number_is_known() -> None:
    assert read_rank_info({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == RankInfo(5, 8, 1, 4)


def test_ranks_of_one_machine_rendezvous_on_loopback() -> None:
    assert rendezvous_address(HYDRA) == "127.0.0.1:29500"
    assert rendezvous_address({**SRUN, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "6"}).startswith("127.0.0.1:")  # type: ignore[union-attr]


def test_tasks_of_srun_rendezvous_on_the_first_machine_of_the_step() -> None:
    host, port = str(rendezvous_address(SRUN)).split(":")
    assert host == "gpu07" and 20000 <= int(port) < 30000
    assert (
        rendezvous_address({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}) == f"{host}:{port}"
    )
    assert rendezvous_address({**SRUN, "SLURM_STEP_NODELIST": "x[3-4]"}) == f"x3:{port}"


def test_two_jobs_of_one_machine_rendezvous_at_different_ports() -> None:
    jobs = [{**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step} for job in (7, 8) for step in ("0", "1")]
    jobs += [{**OPEN_MPI, "PMIX_NAMESPACE": name} for name in ("prterun-a-1@1", "prterun-a-2@1")]
    assert len({str(rendezvous_address(job)).split(":")[1] for job in jobs}) == 6


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, SRUN])
def test_an_exported_address_counts_more(environment: dict[str, str]) -> None:
    assert rendezvous_address({**environment, "MASTER_ADDR": "head", "MASTER_PORT": "4000"}) == "head:4000"
    assert rendezvous_address({**environment, "MASTER_ADDR": "fd00::1"}) == "[fd00::1]:29500"
    assert str(rendezvous_address({**environment, "MASTER_PORT": "4000"})).endswith(":4000")


def test_mpi_ranks_on_several_machines_without_an_address_are_told_how_to_give_one() -> None:
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(WorldError, match="mpirun -x MASTER_ADDR=") as caught:
        rendezvous_address(several)
    assert caught.value.code == "world.no-rendezvous"
    assert rendezvous_address({**several, "MASTER_ADDR": "head"}) == "head:29500"


def test_an_exported_rank_is_one_that_no_launcher_set() -> None:
    by_hand = {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "head"}
    found = read_exported(by_hand)
    assert found and (found.rank, found.world, found.host, found.port) == (4, 8, "head", 29500)
    assert read_exported({**by_hand, "LOCAL_RANK": "0"}) is None
    assert read_exported({"RANK": "4", "WORLD_SIZE": "8"}) is None
    assert read_exported(OPEN_MPI) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "zero"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
        {name: value for name, value in HYDRA.items() if name != "PMI_SIZE"},
        {**SRUN, "SLURM_PROCID": "6"},
        {**SRUN, "SLURM_NODEID": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "lots"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "9" * 50},
    ],
)
def test_variables_that_make_no_sense_have_a_code(environment: dict[str, str]) -> None:
    with pytest.raises(WorldError) as caught:
        read_rank_info(environment)
    assert caught.value.code == "world.bad-environment"


def join_and_add(rank: int, environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    world = process_group.init_world(timeout=60)
    tensor = torch.tensor([world.rank_info.rank + 1.0])
    torch.distributed.all_reduce(tensor)
    (folder / str(rank)).write_text(f"{world.backend} {world.rank_info.local_rank} {tensor.item()}")
    process_group.destroy()


def test_tasks_of_mpirun_join_one_world(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = {name: os.environ[name] for name in ("PATH", "HOME", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    task = {**ours, **OPEN_MPI, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(2):
        own = {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
        ranks.append(get_context("fork").Process(target=join_and_add, args=(rank, task | own, tmp_path)))
        ranks[-1].start()
    for process in ranks:
        process.join(60)
        process.kill()  # where it hangs
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["gloo 0 3.0", "gloo 1 3.0"]


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("3", 3), ("", 0), ("many", 0), ("-1", 0)])
def test_the_number_of_restarts_is_read(text: str, number: int) -> None:
    assert restart_count({"TORCHELASTIC_RESTART_COUNT": text}) == number


def test_folders_and_the_suspect_step_come_from_the_launcher() -> None:
    told = {"PACELINE_RUN": "/runs/gpt", "PACELINE_PROGRESS": "/tmp/logs", "PACELINE_SUSPECT_STEP": "13"}
    assert (run_folder(told), log_folder(told)) == (RunFolder(Path("/runs/gpt")), RunFolder(Path("/tmp/logs")))
    assert suspect_step(told) == 13
    assert run_folder({}) is log_folder({"PACELINE_PROGRESS": ""}) is suspect_step({}) is None


def test_rank_info_is_read_from_the_environment_of_a_launcher() -> None:
    assert read_rank_info({}) is None
    full = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_info(full) == RankInfo(3, 8, 1, 2)
    assert read_rank_info({"RANK": "1", "WORLD_SIZE": "2"}) == RankInfo(1, 2, 1, 2)


@pytest.mark.parametrize("bad", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_invalid_rank_info_has_a_code(bad: dict[str, str]) -> None:
    with pytest.raises(WorldError) as caught:
        read_rank_info(bad)
    assert caught.value.code == "world.bad-environment"


_EXPORTED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "is_on_one"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"MASTER_ADDR": "a"}, False),
        ({"MASTER_ADDR": "a", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"MASTER_ADDR": "a", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}, True),
        ({"MASTER_ADDR": "a", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}, False),
    ],
    ids=str,
)
def test_ranks_are_on_one_machine_if_a_launcher_says_so_or_they_meet_on_loopback(
    variables: dict[str, str], is_on_one: bool
) -> None:
    found = read_rank_info(_EXPORTED | variables)
    assert found is not None and is_on_one_machine(found, _EXPORTED | variables) is is_on_one


def test_a_variable_of_a_rank_without_the_other_is_named() -> None:
    assert incomplete_rank({"WORLD_SIZE": "4"}) == "WORLD_SIZE"
    assert incomplete_rank({}) == incomplete_rank({"RANK": "0", "WORLD_SIZE": "4"}) == ""
