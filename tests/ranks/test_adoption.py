"""The other way round: a Trainer in a process that somebody else already put into a world."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forked
import nodes

TRAIN = """
import json, os, pathlib, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline

def train(model=None, device=None):
    torch.manual_seed(0)
    x = torch.randn(24, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = model or nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = paceline.Trainer(model, optimizer, criterion=nn.MSELoss(), device=device, batch=10, run=False)
    history = trainer.train(data, epochs=2)
    pathlib.Path(f"losses-{trainer.world.rank_info.rank}").write_text(json.dumps([trainer.world.size, history.losses]))
"""

ENVIRONMENT = TRAIN + "train()\n"

WRAPPED = (
    TRAIN
    + """
def own_group():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    with torch.no_grad():
        torch.manual_seed(0)
        torch.randn(24, 3)
        wrapped.module.load_state_dict(nn.Linear(3, 1).state_dict())
    train(wrapped, device=int(os.environ["LOCAL_RANK"]))
    assert dist.is_initialized()  # it is not ours to close
    dist.destroy_process_group()
"""
)

OWN_GROUP = WRAPPED + "own_group()\n"

# What torchrun calls; it forks the ranks.
AGENT = """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
meet = {"run_id": "x", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
elastic_launch(LaunchConfig(1, 1, nproc_per_node=2, start_method="fork", max_restarts=0, **meet), PROGRAM)()
"""

SPAWN = (
    TRAIN
    + """
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(rank, world, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    train(device=rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(worker, args=(2, sys.argv[1]), nprocs=2, start_method=sys.argv[2])
"""
)


def outcome(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("losses-*"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The outcome of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(ENVIRONMENT)
    forked.script(folder / "script.py", cwd=folder).check_returncode()
    [found] = outcome(folder)
    return found


def same_losses(texts: list[str], alone: str) -> bool:
    worlds, losses = zip(*(json.loads(text) for text in texts), strict=True)
    expected = json.loads(alone)[1]
    return set(worlds) == {2} and all(own == pytest.approx(expected, rel=1e-6) for own in losses)


def test_the_agent_of_torchrun(tmp_path: Path, alone: str) -> None:
    (tmp_path / "script.py").write_text(TRAIN + AGENT.replace("PROGRAM", "train"))
    done = forked.script(tmp_path / "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same_losses(outcome(tmp_path), alone)


RECIPE = """
import sys
def train():
    from paceline.tools.cli.main import main
    sys.argv = ["paceline", "train", *sys.argv[1:]]
    main()
"""


@pytest.mark.parametrize(("ranks", "ended"), [((), 0), (("-n", "4"), 1)])
def test_the_agent_runs_a_recipe_as_one_run(tmp_path: Path, ranks: tuple[str, ...], ended: int) -> None:
    """As torchrun --nproc-per-node 2 -m paceline train does."""
    (tmp_path / "script.py").write_text(RECIPE + AGENT.replace("PROGRAM", "train"))
    sizes = ("model.layers=1", "model.width=16", "model.heads=2", "batch=4", "train.max_steps=2", "device=cpu")
    done = forked.script(tmp_path / "script.py", *sizes, *ranks, cwd=tmp_path)
    assert (done.returncode != 0) == bool(ended), done.stderr
    assert ("launch.inside-a-rank" in done.stderr) == bool(ended)
    runs = sorted(tmp_path.glob("runs/*/derived.json"))
    assert [json.loads(path.read_text())["world"]["value"] for path in runs] == ([] if ended else [2])


def test_the_agent_with_a_group_of_the_users_own_and_a_wrapped_model(tmp_path: Path, alone: str) -> None:
    (tmp_path / "script.py").write_text(WRAPPED + AGENT.replace("PROGRAM", "own_group"))
    done = forked.script(tmp_path / "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "destroy_process_group() was not called" not in done.stderr
    assert same_losses(outcome(tmp_path), alone)
    assert "unwrapped from DistributedDataParallel" in done.stdout


@pytest.mark.nightly  # in new interpreters; the test above starts the same ranks by a fork
def test_the_older_launcher_with_a_group_of_the_users_own_and_a_wrapped_model(tmp_path: Path, alone: str) -> None:
    (tmp_path / "script.py").write_text(OWN_GROUP)
    options = ("--nproc-per-node=2", f"--master-port={nodes.reserve_ports()}", "script.py")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "destroy_process_group() was not called" not in done.stderr
    assert same_losses(outcome(tmp_path), alone)
    assert "unwrapped from DistributedDataParallel" in done.stdout


@pytest.mark.parametrize(
    ("address", "method"),
    [
        ("tcp://127.0.0.1:PORT", "fork"),
        ("env://", "fork"),
        pytest.param("tcp://127.0.0.1:PORT", "spawn", marks=pytest.mark.nightly),
    ],
)
def test_processes_of_the_users_own_with_an_address(tmp_path: Path, alone: str, address: str, method: str) -> None:
    (tmp_path / "script.py").write_text(SPAWN)
    port = str(nodes.reserve_ports())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if address == "env://" else {}
    done = forked.script(tmp_path / "script.py", address.replace("PORT", port), method, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "destroy_process_group() was not called" not in done.stderr
    assert same_losses(outcome(tmp_path), alone)
