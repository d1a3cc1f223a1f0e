"""What SLURM's variables say of the allocation that a process is in."""

from __future__ import annotations

from paceline.runtime.scheduler_env import SlurmAllocation, read_allocation

BATCH = {  # as a batch script finds it; SLURM_PROCID is there too
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GPUS_ON_NODE": "4",
}


def test_outside_of_a_job_there_is_no_allocation() -> None:
    assert read_allocation({}) is None


def test_a_batch_script_is_the_front_end() -> None:
    found = read_allocation({**BATCH, "SLURM_RESTART_COUNT": "2"})
    assert found == SlurmAllocation("12", ("n1", "n2"), is_front_end=True, gpus=4, restarts=2)


def test_the_shell_of_salloc_is_the_front_end() -> None:
    shell = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": "a100:4"}
    for more in ({}, {"SLURM_STEP_ID": str(0xFFFFFFFA)}, {"SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "1"}):
        found = read_allocation({**shell, **more})
        assert found is not None and found.is_front_end and found.gpus == 4


def test_a_task_of_srun_is_not_a_front_end() -> None:
    found = read_allocation({**BATCH, "SLURM_STEP_ID": "3"})
    assert found is not None and not found.is_front_end


def test_on_one_node_a_batch_script_is_the_front_end_and_the_shell_of_salloc_is_not() -> None:
    one = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1"}
    shell, script = read_allocation(one), read_allocation({**one, "SLURM_PROCID": "0"})
    assert shell is not None and not shell.is_front_end
    assert script is not None and script.is_front_end
