"""What must be the same on every node."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.launch import Endpoint, LaunchSpec, NodeRange
from paceline.launcher.cluster.fingerprint import NodeOrder, differences, fingerprint, reachable, read
from paceline.launcher.workload import Target


def test_code_is_the_script_and_the_modules_next_to_it(tmp_path: Path) -> None:
    for name in ("train.py", "parts/model.py", ".git/hook.py", "env/lib/x.py", "runs/a/copy.py", "data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    found = fingerprint(script=tmp_path / "train.py", recipe={"launch": {"node_rank": 1}, "model": {"width": 8}})
    assert sorted(found["code"]) == ["parts/model.py", "train.py"]
    assert found["recipe"] == {"model.width": "8"}  # launch: says where a node is, not what it trains


def test_a_changed_file_and_a_changed_key_are_differences(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1")
    before = fingerprint(script=script, recipe={"batch": 16})
    assert differences(before, fingerprint(script=script, recipe={"batch": 16})) == []
    script.write_text("a = 2")
    after = fingerprint(script=script, recipe={"batch": 32})
    assert differences(before, after) == ["code: train.py differs", "recipe: batch is 16 and 32"]


def test_long_values_are_shortened() -> None:
    (found,) = differences({"recipe": {"name": "a" * 100}}, {"recipe": {"name": "b"}})
    assert found == f"recipe: name is {'a' * 59}… and b"


ORDER = NodeOrder(
    node=1,
    token="secret",
    coordinator=(Endpoint("10.0.0.1", 4000), Endpoint("fd00::1", 4000)),
    port=4000,
    spec=LaunchSpec(ranks=2, nodes=NodeRange(1, 3), env={"A": "ü"}),
    target=Target("script", "train.py", ("--name", "a b\n")),
    recipe={"batch": 8},
    folder="/somewhere",
)


def sent(data: bytes) -> int:
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    return reader


def test_an_order_arrives_as_it_was_sent_and_what_follows_is_left_unread() -> None:
    reader = sent(ORDER.line() + b"what follows")
    try:
        assert read(reader) == ORDER
        assert os.read(reader, 100) == b"what follows"
    finally:
        os.close(reader)


@pytest.mark.parametrize("data", [b"", ORDER.line()[:20]])
def test_an_order_that_ends_early_ends_the_launcher(data: bytes) -> None:
    reader = sent(data)
    try:
        with pytest.raises(SystemExit, match="no order"):
            read(reader)
    finally:
        os.close(reader)


def test_the_address_that_ssh_or_srun_came_from_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 50000 10.0.0.2 22")
    assert reachable(ORDER) == list(ORDER.coordinator)  # a connection of the user's own
    assert reachable(replace(ORDER, by_ssh=True)) == [Endpoint("10.0.0.9", 4000), *ORDER.coordinator]
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    assert reachable(ORDER) == list(ORDER.coordinator)  # known already
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.8")
    assert reachable(ORDER)[-1] == Endpoint("10.0.0.8", 4000)
