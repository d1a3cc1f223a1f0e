from __future__ import annotations

from typing import Any

import pytest

from paceline.config.launch import LaunchSpec
from paceline.config.sections import SweepSection
from paceline.errors import SearchError
from paceline.tools.search.placement import Machine, Pool, open_pool


def gpus(name: str, number: int) -> Machine:
    return Machine(name, tuple(map(str, range(number))), has_gpus=True)


def env_of(pool: Pool) -> list[Any]:
    return [slot.options(LaunchSpec()).env for slot in iter(pool.take, None)]


def test_no_gpu_is_given_to_two_trials() -> None:
    pool = Pool([gpus("", 4)], 2, 8)
    first, second = pool.take(), pool.take()
    assert first is not None and second is not None and pool.take() is None
    assert [slot.options(LaunchSpec()).env["CUDA_VISIBLE_DEVICES"] for slot in (first, second)] == ["0,1", "2,3"]
    pool.give_back(first)
    third = pool.take()
    assert third is not None and str(third) == "GPU 0,1"


def test_trials_share_a_gpu_only_if_asked_for() -> None:
    machine = Machine("", ("0", "0"), has_gpus=True)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in env_of(Pool([machine], 1, 8))] == ["0", "0"]


def test_parallel_is_a_limit() -> None:
    assert len(env_of(Pool([gpus("", 8)], 1, 3))) == 3


def test_the_fullest_machine_with_room_is_used_first() -> None:
    pool = Pool([gpus("a", 4), gpus("b", 2)], 2, 8)
    assert [str(slot) for slot in iter(pool.take, None)] == ["b GPU 0,1", "a GPU 0,1", "a GPU 2,3"]


def test_a_trial_may_take_whole_machines() -> None:
    pool = Pool([gpus(name, 2) for name in "abcd"], 4, 8, "hosts")
    slots = list(iter(pool.take, None))
    assert [slot.options(LaunchSpec()).hosts for slot in slots] == ["a:2,b:2", "c:2,d:2"]


def test_a_trial_that_never_fits_is_an_error() -> None:
    with pytest.raises(SearchError, match=r"search\.no-room.*3 ranks, but there are 4 places on 2 machines"):
        Pool([gpus("a", 2), gpus("b", 2)], 3, 1)


def test_a_machine_without_gpus_runs_as_many_trials_as_asked_for() -> None:
    spec = LaunchSpec(ranks=2, device="cpu")
    assert env_of(open_pool(spec, SweepSection(parallel=3), {})) == [{}, {}, {}]
    assert env_of(open_pool(spec, SweepSection(), {})) == [{}]


def test_hosts_are_places() -> None:
    pool = open_pool(LaunchSpec(ranks=1, hosts="a:2,b"), SweepSection(), {})
    assert [slot.options(LaunchSpec()).hosts for slot in iter(pool.take, None)] == ["b:1", "a:1", "a:1"]


def test_a_trial_sees_its_part_of_a_slurm_allocation() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "2"}
    pool = open_pool(LaunchSpec(ranks=2), SweepSection(), environment)
    slots = list(iter(pool.take, None))
    assert [slot.node_env["SLURM_JOB_NODELIST"] for slot in slots] == ["n1", "n2"]
    assert [slot.options(LaunchSpec()).env["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0,1", "0,1"]


def test_ranks_of_a_trial_do_not_share_a_gpu() -> None:
    spec = LaunchSpec(ranks=4, hosts="a:2,b:2")
    pool = open_pool(spec, SweepSection(per_gpu=2), {})
    assert [slot.options(spec).hosts for slot in iter(pool.take, None)] == ["a:2,b:2"] * 2
    with pytest.raises(SearchError, match=r"4 ranks, but there are 2 places on 1 machine"):
        open_pool(LaunchSpec(ranks=4, hosts="a:2"), SweepSection(per_gpu=2), {})


def test_no_more_trials_are_announced_than_there_is_room_for() -> None:
    assert open_pool(LaunchSpec(ranks=2, hosts="a:1,b:1,c:1"), SweepSection(parallel=3), {}).parallel == 1
    assert open_pool(LaunchSpec(ranks=2, hosts="a:4,b:4"), SweepSection(), {}).parallel == 4


def test_gpus_are_no_places_of_trials_on_cpus() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    for hosts, names in (("a:1,b:1", ["a", "b"]), (None, ["n1", "n2"])):
        spec = LaunchSpec(ranks=1, hosts=hosts, device="cpu")
        slots = list(iter(open_pool(spec, SweepSection(), environment).take, None))
        assert [(str(slot), slot.options(spec).env) for slot in slots] == [(name, {}) for name in names]


def test_trials_of_a_task_of_srun_stay_on_its_node() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_ID": "0"}
    pool = open_pool(LaunchSpec(ranks=1, device="cpu"), SweepSection(), environment)
    assert [(str(slot), slot.node_env) for slot in iter(pool.take, None)] == [("this machine", {})]
