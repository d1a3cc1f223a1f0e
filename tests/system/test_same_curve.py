"""One training script, wherever it is launched: the same loss in every step.

SLURM and Ray are slow to start, so that their part of this is where they run: test_slurm.py and test_ray.py.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from nodes import ended, launchers, reserve_ports
from paceline.launcher.local import agent as _agent  # noqa: F401  # once, before launchers are forked
from system import curve, namespaces, ssh_server

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts an ssh server: set PACELINE_SYSTEM_TESTS=1"
)


@pytest.mark.nightly
def test_on_one_machine(tmp_path: Path) -> None:
    with launchers(tmp_path) as launch:
        launcher = launch("launch", "-n", "2", curve.write_script(tmp_path))
        assert launcher.end() == 0, launcher.said
    curve.assert_same(tmp_path)


@pytest.mark.nightly
def test_by_hand_on_two_machines(tmp_path: Path) -> None:
    script = curve.write_script(tmp_path)
    with namespaces.joined() as machines, launchers(tmp_path) as launch:
        meet = ("--nodes", "2", "--master", f"{machines[0].address}:{reserve_ports()}", "-n", "1")
        nodes = [
            launch("launch", *meet, "--node-rank", str(rank), script, enter=machine.enter)
            for rank, machine in enumerate(machines)
        ]
        assert ended(*nodes) == [0, 0], nodes[0].said + nodes[1].said
    curve.assert_same(tmp_path)


@pytest.mark.nightly
def test_over_ssh(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ssh_server.running(tmp_path_factory.mktemp("ssh")) as server:
        curve.launch(tmp_path, "--hosts", "node-a,node-b", "--ssh", shlex.join(server.ssh))
