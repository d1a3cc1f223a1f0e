"""Whether a job in an allocation is requeued; tests/system has a real SLURM."""

from __future__ import annotations

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
