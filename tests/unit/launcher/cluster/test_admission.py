"""Which nodes a meeting admits, and how it refuses the others."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launcher.cluster.admission import JoinRequest, nodes_missing, place
from paceline.launcher.cluster.fingerprint import Identity, identity

SAME: Identity = {"version": {"torch": "2.5"}, "code": {"a.py": "0f"}, "recipe": {"batch": "16"}}


def hello(node: int | None = None, nodes: tuple[int, int] = (4, 4), own: Identity = SAME) -> JoinRequest:
    return JoinRequest("host-b", 2, nodes, node, own)


def refusal(*args: Any, free: tuple[int, ...] = (1, 2, 3), **kwargs: Any) -> LaunchError:
    with pytest.raises(LaunchError) as refused:
        place(hello(*args, **kwargs), 4, 4, free, SAME)
    assert "host-b" in refused.value.what or refused.value.code == "launch.bad-number"
    return refused.value


def test_a_node_gets_the_number_that_it_asks_for_else_the_first_free_one() -> None:
    assert place(hello(2), 4, 4, [1, 2, 3], SAME) == 2
    assert place(hello(), 4, 4, [3, 2], SAME) == 2
    assert place(hello(), 4, 4, range(4), None) == 0


def test_a_number_that_is_taken_is_refused_and_free_ones_are_named() -> None:
    refused = refusal(0)
    assert refused.code == "launch.node-rank-taken" and "free numbers: 1, 2, 3" in refused.fix


@pytest.mark.parametrize("number", [4, -1])
def test_a_number_that_there_is_not_is_refused(number: int) -> None:
    refused = refusal(number)
    assert refused.code == "launch.bad-number" and "from 0 to 3" in refused.fix


def test_one_too_many_is_refused() -> None:
    assert refusal(free=()).code == "launch.job-is-full"


@pytest.mark.parametrize(
    ("nodes", "words"), [((2, 2), "nodes: 4 and 2"), ((1, 4), "nodes: 4 and 1:4")]
)  # fmt: skip
def test_another_world_is_refused(nodes: tuple[int, int], words: str) -> None:
    refused = refusal(nodes=nodes)
    assert refused.code == "launch.node-differs" and words in refused.what


@pytest.mark.parametrize(
    ("aspect", "own", "words"),
    [
        ("version", {"torch": "2.4"}, "version: torch is 2.5 and 2.4"),
        ("recipe", {"batch": "32"}, "recipe: batch is 16 and 32"),
        ("recipe", {}, "recipe: batch is 16 and not set"),
        ("code", {"a.py": "1e"}, "code: a.py has other text"),
        ("code", {}, "code: a.py is missing here"),
        ("code", {"a.py": "0f", "b.py": "0f"}, "code: b.py is not on the first node"),
    ],
)
def test_another_version_recipe_or_code_is_refused_and_named(aspect: str, own: dict[str, str], words: str) -> None:
    refused = refusal(own={**SAME, aspect: own})
    assert refused.code == "launch.node-differs" and words in refused.what


def test_many_differences_are_counted() -> None:
    own = {**SAME, "code": {f"{letter}.py": "0" for letter in "bcdefgh"}}
    assert "; and 3 more" in refusal(own=own).what


def test_an_installed_version_of_another_number_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = identity(script=None, recipe=None)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0.1")
    there = identity(script=None, recipe=None)
    with pytest.raises(LaunchError, match=r"paceline is .* and 0\.0\.1; version: torch is .* and 0\.0\.1"):
        place(hello(own=there), 4, 4, [1], here)


def test_code_is_the_script_and_what_lies_beside_it(tmp_path: Path) -> None:
    for name in ("train.py", "parts/model.py", ".git/hook.py", "env/lib/x.py", "runs/a/copy.py", "data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    found = identity(script=tmp_path / "train.py", recipe={"launch": {"node_rank": 1}, "model": {"width": 8}})
    assert sorted(found["code"]) == ["parts/model.py", "train.py"]
    assert found["recipe"] == {"model.width": "8"}  # where a node is says nothing of what it trains


def test_the_missing_ones_are_named() -> None:
    assert "Nodes 1, 3 did not come within 600 s." in str(nodes_missing([1, 3], 600))
    assert "Node 1 did not come within 0.5 s." in str(nodes_missing([1], 0.5))
