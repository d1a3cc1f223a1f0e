"""Whether a job in an allocation is requeued; tests/system has a real SLURM."""

from __future__ import annotations

import pytest

from paceline.launcher.backends import slurm_allocation
from paceline.runtime.scheduler_env import read_allocation

BATCH = {  # as a batch script finds it; SLURM_PROCID is there too
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GPUS_ON_NODE": "4",
}


def test_a_signal_to_the_front_end_is_never_answered_with_a_requeue() -> None:
    found = read_allocation(BATCH)
    assert found is not None
    assert slurm_allocation.wants_requeue(found, warned=True, terminated=False)
    assert not slurm_allocation.wants_requeue(found, warned=True, terminated=True)


@pytest.mark.parametrize(
    "said",
    [  # by srun of SLURM 22.05
        "Unable to create step for job 1: Requested nodes are busy",
        "Unable to create step for job 1: Job/step already completing or completed",
        "Unable to confirm allocation for job 2: Socket timed out on send/recv operation",
        "Unable to confirm allocation for job 6: Unable to contact slurm controller (connect failure)",
        "Application launch failed: Communication connection failure",
        "a: task 0: Killed",
    ],
)
def test_a_step_that_slurm_lost_or_could_not_create_yet_is_an_accident(said: str) -> None:
    assert slurm_allocation.is_accident(f"exit status 1\nsrun: error: {said}")


@pytest.mark.parametrize(
    "said",
    [
        "srun: error: Unable to create step for job 1: Requested node configuration is not available",
        "srun: error: Unable to confirm allocation for job 99999: Invalid job id specified",
        "srun: error: Slurm job 1 has expired",
        "slurmstepd-a: error: execve(): python: No such file\nsrun: error: a: task 0: Exited with exit code 2",
        "ConnectionRefusedError: Connection refused\nsrun: error: a: task 0: Exited with exit code 1",
        "srun: error: a: task 0: Segmentation fault",
        "",
    ],
)
def test_a_refusal_that_would_be_repeated_is_none(said: str) -> None:
    assert not slurm_allocation.is_accident(f"exit status 1\n{said}")
