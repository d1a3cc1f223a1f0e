"""Launchers of two nodes on loopback: they find each other, fail together, and go on together to the same loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny  # noqa: F401  # once, before launchers are forked
from nodes import SCRIPT, STEPS, Job, ended, eventually, launchers, run_unbroken
from paceline.launcher.local import agent as _agent  # noqa: F401
from paceline.runtime.network import LOOPBACK, listen


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with launchers(tmp_path) as launch:
        yield Job(tmp_path, launch)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training on one node, in which nothing happens."""
    return run_unbroken(tmp_path_factory.mktemp("unbroken"))


def test_two_nodes_train_as_one_does(job: Job, unbroken: Job) -> None:
    """They are numbered in the order of joining, and missing ones are named."""
    first = job.node(None)
    eventually(lambda: first.says("waiting for nodes: 1 of 2 joined, missing: 1"))
    second = job.node(None)
    assert ended(first, second) == [0, 0], first.said + second.said
    assert "node 0 of 2: ranks 0 to 1 of 4" in first.said and "node 1 of 2: ranks 2 to 3 of 4" in second.said
    job.assert_same(unbroken)


@pytest.mark.nightly  # a rank that fails is told to every node below; a node that is lost is replaced
def test_all_ranks_restart_after_one_was_killed(job: Job, unbroken: Job) -> None:
    first, second = job.both("0:11:rank-SIGKILL", options=("--max-restarts", "1"))
    assert ended(first, second) == [0, 0], first.said + second.said
    for node in (first, second):
        assert "restart 1 of 1: rank 3 (node 1) was killed by SIGKILL" in node.said
    job.assert_same(unbroken, began=range(8, 9))


def test_the_first_failure_is_shown_on_every_node_with_the_same_status(job: Job) -> None:
    first, second = job.both("0:3:raise")
    assert ended(first, second) == [1, 1], first.said + second.said
    for node in (first, second):
        assert "rank 3 failed first" in node.said and "rank 3 (node 1)" in node.said
        assert node.said.count("Traceback") == node.said.count("ValueError: the injected reason") == 1, node.said


def test_a_killed_launcher_is_replaced_and_training_resumes(job: Job, unbroken: Job) -> None:
    first, second = job.both("0:11:launcher-SIGKILL", options=("--max-restarts", "1"))
    eventually(lambda: second.status is not None)
    again = job.node(1, "0:11:launcher-SIGKILL", options=("--max-restarts", "1"))
    assert ended(first, again, second) == [0, 0, -signal.SIGKILL], first.said + again.said
    assert "restart 1 of 1: node 1 was lost (node-lost)" in first.said
    assert "its ranks keep running until a new launcher takes over" in first.said
    job.assert_same(unbroken, began=range(11, STEPS + 1))  # its ranks kept running until then


def test_training_continues_on_the_remaining_nodes_and_a_late_node_joins(job: Job, unbroken: Job) -> None:
    job.nodes = "1:2"
    deeds, options = ("0:11:node-SIGKILL", "1:15:wait"), ("--max-restarts", "1")
    first, second = job.both(*deeds, options=options)
    eventually(lambda: first.says("node 0 of 1: ranks 0 to 1 of 2") and job.waits(in_start=1))
    late = job.node(None, *deeds, options=options)
    assert ended(first, late, second) == [0, 0, -signal.SIGKILL], first.said + late.said
    assert first.said.count("restart ") == 1  # a restart for a new node is not counted
    assert "node 1 of 2: ranks 2 to 3 of 4" in late.said
    job.assert_same(unbroken, began=range(15, 16))


def test_losing_the_first_node_ends_the_others_and_the_run_can_be_resumed(job: Job, unbroken: Job) -> None:
    first, second = job.both("0:11:wait")
    eventually(lambda: first.says("step 1/") and job.waits(in_start=0))
    first.crash()
    lost_at = time.monotonic()
    assert second.end() == 78, second.said
    assert time.monotonic() - lost_at < 10
    assert second.said.count("[launch.coordinator-lost]") == 1 and "Traceback" not in second.said
    assert ended(*job.both(options=("--resume",))) == [0, 0]
    job.assert_same(unbroken, began=range(8, 9))


def test_an_interrupt_on_any_node_saves_on_all(job: Job, unbroken: Job) -> None:
    first, second = job.both("0:11:launcher-SIGINT")
    assert ended(first, second) == [130, 130], first.said + second.said
    for node in (first, second):
        assert "interrupted" in node.said and "Traceback" not in node.said and "failed first" not in node.said
    assert ended(*job.both(options=("--resume",))) == [0, 0]
    job.assert_same(unbroken, began=range(11, 12))


def test_a_second_ctrl_c_kills_a_rank_of_another_node_that_blocks(job: Job) -> None:
    first, second = job.both("0:11:block")
    eventually((job.folder / "blocked").exists)
    os.killpg(first.pid, signal.SIGINT)
    eventually(lambda: first.says("press Ctrl-C again"))
    os.killpg(first.pid, signal.SIGINT)
    assert ended(first, second) == [130, 130], first.said + second.said
    assert "coordinator-lost" not in second.said


def test_a_node_that_differs_is_rejected_and_does_not_disturb_the_others(job: Job, tmp_path: Path) -> None:
    first = job.node(0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "script.py").write_text(SCRIPT + "# more\n")
    rejections = {
        "[launch.node-differs]": (job.node(1, where=elsewhere), "code: script.py differs"),
        "[launch.bad-number]": (job.node(7), "Invalid value for --node-rank: 7. The job has 2 nodes."),
    }
    job.nodes = "3"
    rejections["nodes: 2 and 3"] = (job.node(1), "[launch.node-differs]")
    job.nodes = "2"
    for code, (node, words) in rejections.items():
        assert node.end() == 2 and code in node.said and words in node.said, node.said
        assert "Traceback" not in node.said
    assert first.status is None
    second = job.node(1)
    assert ended(first, second) == [0, 0], first.said + second.said


def test_a_second_node_with_the_same_number_is_rejected(job: Job) -> None:
    job.nodes = "3"
    first, second, third = *job.both(), job.node(1)
    eventually(lambda: second.status is not None or third.status is not None)
    rejected, other = (second, third) if second.status is not None else (third, second)
    assert rejected.end() == 2 and "[launch.node-rank-taken]" in rejected.said and "free numbers: " in rejected.said
    assert other.status is None and first.status is None


def test_a_recipe_with_another_value_is_rejected_and_the_value_named(job: Job) -> None:
    first = job.launch("train", "-n", "1", *job.meet(0), "device=cpu", "batch=16")
    second = job.launch("train", "-n", "1", *job.meet(1), "device=cpu", "batch=32")
    assert second.end() == 2, second.said
    assert "[launch.node-differs]" in second.said and "recipe: batch is 16 and 32" in second.said
    assert first.status is None


def test_a_port_in_use_for_the_store_is_reported_on_every_node(job: Job) -> None:
    port = int(job.master.rpartition(":")[2]) + 1
    with listen(LOOPBACK, port):
        first, second = job.both()
        assert ended(first, second) == [2, 2], first.said + second.said
    for node in (first, second):
        assert f"Port {port} cannot be opened" in node.said and "Traceback" not in node.said
