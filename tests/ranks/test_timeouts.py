"""The timeout of collectives is that of every group, also of those that a device mesh creates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import nodes
import tiny
from paceline.diagnose.exits import EXIT_STATUSES
from paceline.testing import ranks

SCRIPT = f"""
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import tiny
from test_timeouts import timeouts

trainer = tiny.gpt_trainer(strategy="hsdp", timeout=10.0, log_every=1000, run=False)

def hang(*_):
    if trainer.step_count == 3:
        Path(f"timeouts-{{os.environ['RANK']}}").write_text(json.dumps(timeouts()))
        if os.environ["RANK"] == "3":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher need not wait for a save
            time.sleep(1000)

trainer.model.register_forward_pre_hook(hang)
trainer.train(tiny.Sequences(64), max_steps=10)
"""


def timeouts() -> dict[str, float]:
    """Of every group of this process, in seconds."""
    groups = torch_dist.distributed_c10d._world.pg_map
    own = {group: group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    return {f"{group.group_desc} {group.group_name}": timeout.total_seconds() for group, timeout in own.items()}


def test_a_rank_that_hangs_under_hsdp_is_missed_after_the_timeout(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with nodes.launchers(tmp_path) as launch:
        launcher = launch("launch", "-n", "4", "script.py")
        status = launcher.end()
    assert status == EXIT_STATUSES["timeout"] and "rank 3, which is still running" in launcher.said, launcher.said
    for rank in range(4):
        found = json.loads((tmp_path / f"timeouts-{rank}").read_text())
        assert sum(name.startswith("mesh_") for name in found) >= 2 and set(found.values()) == {10.0}, found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"strategy": "hsdp"}, marks=pytest.mark.nightly),  # its groups are seen above
        pytest.param({"layout": {"tensor": 2, "shard": 2}}, marks=pytest.mark.nightly),
        {"layout": {"pipeline": 2, "shard": 2}},
    ],
    ids=str,
)
@ranks(4)
def test_the_groups_of_a_mesh_have_the_timeout_of_the_users_group(settings: dict[str, Any]) -> None:
    trainer = tiny.gpt_trainer(timeout=45.0, **settings)
    trainer.train(tiny.Sequences(32), max_steps=2)
    found = timeouts()
    own = {name: found.pop(name) for name in list(found) if name.startswith(("default_pg", "mesh_"))}
    assert len(own) > 2 and set(own.values()) == {60.0}, own  # the test's
    assert set(found.values()) <= {45.0}  # of background messages
