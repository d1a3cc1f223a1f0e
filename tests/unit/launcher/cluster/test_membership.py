"""Which nodes may join a job, and how others are rejected."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest

from paceline.config.launch import NodeRange
from paceline.errors import LaunchError
from paceline.launcher.cluster.fingerprint import Fingerprint, fingerprint
from paceline.launcher.cluster.membership import JoinRequest, assign_node, nodes_missing

SAME: Fingerprint = {"version": {"torch": "2.5"}, "code": {"a.py": "0f"}, "recipe": {"batch": "16"}}
FOUR = NodeRange(4, 4)


def request(node: int | None = None, nodes: NodeRange = FOUR, own: Fingerprint = SAME) -> JoinRequest:
    return JoinRequest("host-b", 2, nodes, node, own)


def rejection(*args: Any, free: tuple[int, ...] = (1, 2, 3), **kwargs: Any) -> LaunchError:
    with pytest.raises(LaunchError) as rejected:
        assign_node(request(*args, **kwargs), FOUR, free, SAME)
    assert "host-b" in rejected.value.what or rejected.value.code == "launch.bad-number"
    return rejected.value


@pytest.mark.parametrize("node", [None, 3])
def test_a_join_request_arrives_as_it_was_sent(node: int | None) -> None:
    sent = request(node, NodeRange(1, 4))
    assert JoinRequest.from_message(json.loads(json.dumps(sent.to_message()))) == sent


def test_a_node_gets_the_number_it_requests_else_the_lowest_free_one() -> None:
    assert assign_node(request(2), FOUR, [1, 2, 3], SAME) == 2
    assert assign_node(request(), FOUR, [3, 2], SAME) == 2
    assert assign_node(request(), FOUR, range(4), None) == 0


def test_a_number_that_is_taken_is_rejected_and_free_ones_are_named() -> None:
    rejected = rejection(0)
    assert rejected.code == "launch.node-rank-taken" and "free numbers: 1, 2, 3" in rejected.fix


@pytest.mark.parametrize("number", [4, -1])
def test_a_number_out_of_range_is_rejected(number: int) -> None:
    rejected = rejection(number)
    assert rejected.code == "launch.bad-number" and "from 0 to 3" in rejected.fix


def test_one_node_too_many_is_rejected() -> None:
    rejected = rejection(free=())
    assert rejected.code == "launch.job-is-full"
    assert rejected.what == "The job already has all 4 nodes; host-b was rejected."


@pytest.mark.parametrize(
    ("nodes", "words"), [(NodeRange(2, 2), "nodes: 4 and 2"), (NodeRange(1, 4), "nodes: 4 and 1:4")]
)
def test_another_number_of_nodes_is_rejected(nodes: NodeRange, words: str) -> None:
    rejected = rejection(nodes=nodes)
    assert rejected.code == "launch.node-differs" and words in rejected.what


@pytest.mark.parametrize(
    ("aspect", "own", "words"),
    [
        ("version", {"torch": "2.4"}, "version: torch is 2.5 and 2.4"),
        ("recipe", {"batch": "32"}, "recipe: batch is 16 and 32"),
        ("recipe", {}, "recipe: batch is 16 and not set"),
        ("code", {"a.py": "1e"}, "code: a.py differs"),
        ("code", {}, "code: a.py is missing"),
        ("code", {"a.py": "0f", "b.py": "0f"}, "code: b.py is not on the first node"),
    ],
)
def test_another_version_recipe_or_code_is_rejected_and_named(aspect: str, own: dict[str, str], words: str) -> None:
    rejected = rejection(own={**SAME, aspect: own})
    assert rejected.code == "launch.node-differs" and words in rejected.what


def test_many_differences_are_counted() -> None:
    own = {**SAME, "code": {f"{letter}.py": "0" for letter in "bcdefgh"}}
    assert "; and 3 more" in rejection(own=own).what


def test_different_installed_versions_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    here = fingerprint(script=None, recipe=None)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0.1")
    there = fingerprint(script=None, recipe=None)
    with pytest.raises(LaunchError, match=r"paceline is .* and 0\.0\.1; version: torch is .* and 0\.0\.1"):
        assign_node(request(own=there), FOUR, [1], here)


def test_missing_nodes_are_named() -> None:
    assert "Nodes 1, 3 did not join within 600 s." in str(nodes_missing([1, 3], 600))
    assert "Node 1 did not join within 0.5 s." in str(nodes_missing([1], 0.5))
