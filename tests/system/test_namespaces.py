"""Several nodes by hand on two machines with addresses of their own: two network namespaces."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny  # noqa: F401  # once, before launchers are forked
from nodes import Job, ended, eventually, launchers, run_unbroken
from paceline.config.launch import DEFAULT_PORT
from paceline.launcher.local import agent as _agent  # noqa: F401
from system import namespaces, two_nodes
from system.namespaces import Machine

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="makes network namespaces: set PACELINE_SYSTEM_TESTS=1"
)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with namespaces.joined() as both:
        yield both


@pytest.fixture
def job(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Job]:
    with launchers(tmp_path) as launch:
        yield Job(tmp_path, launch, machines[0].address, enter={n: each.enter for n, each in enumerate(machines)})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_unbroken(tmp_path_factory.mktemp("unbroken"))


def test_two_machines_train_as_one_does_and_listen_where_they_have_to(
    machines: tuple[Machine, Machine], job: Job, unbroken: Job
) -> None:
    first, second = job.both("0:11:wait")
    eventually(lambda: first.says("node 0 of 2: ranks 0 to 1 of 4") and job.waits(in_start=0))
    here, there = machines
    assert {(here.address, DEFAULT_PORT), (here.address, DEFAULT_PORT + 1)} <= here.listening()
    assert {host for host, _ in here.listening()} == {here.address}
    assert {host for host, _ in there.listening()} <= {there.address}
    second.send(signal.SIGTERM)
    assert ended(first, second) == [143, 143], first.said + second.said
    assert ended(*job.both(options=("--resume",))) == [0, 0]
    job.assert_same(unbroken, began=range(11, 12))


def test_an_unreachable_machine_is_noticed_and_the_other_continues(
    machines: tuple[Machine, Machine], job: Job, unbroken: Job
) -> None:
    job.nodes = "1:2"
    first, second = job.both("0:11:wait", options=("--max-restarts", "1"))
    eventually(lambda: first.says("node 0 of 2") and job.waits(in_start=0))
    machines[1].cut_off()
    assert ended(first, second) == [0, 78], first.said + second.said
    assert "restart 1 of 1: node 1 was lost (node-lost)" in first.said
    assert "[launch.coordinator-lost]" in second.said
    job.assert_same(unbroken, began=range(8, 9), world=2)


@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(4.5, marks=pytest.mark.nightly), pytest.param(9.0, marks=pytest.mark.nightly)]
)
def test_a_link_that_is_cut_and_healed_is_survived_or_ends_both_sides(seconds: float, tmp_path: Path) -> None:
    with two_nodes.joined(tmp_path) as (job, machine):
        assert two_nodes.cut_and_heal(job, machine, seconds) == []


@pytest.mark.parametrize("lock", ["gil", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("python", "c"))])
def test_a_second_interrupt_ends_a_rank_of_the_other_machine_that_hangs_in_a_lock(lock: str, tmp_path: Path) -> None:
    with two_nodes.joined(tmp_path) as (job, _):
        assert two_nodes.interrupt_twice(job, lock) == []


@pytest.mark.nightly
def test_a_recipe_trains_on_two_machines(machines: tuple[Machine, Machine], job: Job) -> None:
    nodes = [
        job.launch("train", "-n", "1", *job.meet(rank), "device=cpu", "train.max_steps=2", enter=each.enter)
        for rank, each in enumerate(machines)
    ]
    assert ended(*nodes) == [0, 0], nodes[0].said + nodes[1].said
    assert "node 1 of 2: rank 1 of 2" in nodes[1].said
    assert len(list((job.folder / "runs").glob("*/metrics.jsonl"))) == 1
