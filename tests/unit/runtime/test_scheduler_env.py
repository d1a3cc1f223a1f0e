"""What SLURM's variables say of the allocation that a process is in."""

from __future__ import annotations

import pytest

from paceline.errors import WorldError
from paceline.runtime.scheduler_env import MAX_HOSTS, SlurmAllocation, expand, expand_counts, read_allocation

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


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu-a", ["gpu-a"]),
        ("node[01-03,7],gpu-a", ["node01", "node02", "node03", "node7", "gpu-a"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101].dc1", ["n099.dc1", "n100.dc1", "n101.dc1"]),
        ("rack[1-2]n[1,3]", ["rack1n1", "rack1n3", "rack2n1", "rack2n3"]),
        ("b,a[2,1]", ["b", "a2", "a1"]),
        (" 10.0.0.[1-2]\n", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_a_list_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_as_many_machines_as_slurm_can_have_are_expanded() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ",",
            "a,",
            ",a",
            "a,,b",
            "a[",
            "a]",
            "a[1",
            "a[]",
            "a[1-]",
            "a[-1]",
            "a[3-1]",
            "a[1x3]",
            "a[[1]]",
            "a[1]]",
        ),
        *("-oProxyCommand=x", "[1-2]a b", "a;b", "$(a)", "a\nb", "a\0", "ä", "a/b", "a" * 300, "x" * 250 + "[1-10000]"),
        *(
            f"n[0-{MAX_HOSTS}]",
            "n[1-999999999]",
            "n[1-9999999999]",
            "a[1-9999]b[1-9999]",
            "a[1-9]" * 9,
            f"a[1-{MAX_HOSTS}],b",
        ),
    ],
)
def test_an_invalid_list_has_a_code(text: str) -> None:
    with pytest.raises(WorldError) as caught:
        expand(text)
    assert caught.value.code == "world.bad-environment"
    assert len(str(caught.value)) < 2000


def test_counts_are_expanded() -> None:
    assert expand_counts("4") == [4]
    assert expand_counts("4(x2),1") == [4, 4, 1]


@pytest.mark.parametrize("text", ["", ",", "4,", "x", "4(x)", "4(2)", "-1", "4(x999999)", "1(x65536),1"])
def test_what_are_no_counts_has_a_code(text: str) -> None:
    with pytest.raises(WorldError) as caught:
        expand_counts(text)
    assert caught.value.code == "world.bad-environment"
