"""Process groups that a script opens and destroys itself. Destroying one while a gloo worker still frees its last
collective deadlocks in plain torch, mostly within five rounds (benchmarks/destroyed_groups.py has the rates)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from forked import paceline as command
from paceline.testing import run_on_ranks

ROUNDS = 25


def open_and_destroy(folder: Path, rank: int, number: int) -> None:
    """The reducer of DDP drops the last reference to the group, and holds the GIL."""
    store = dist.FileStore(str(folder / f"store-{number}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    dist.all_reduce(torch.zeros(2))
    dist.destroy_process_group()


def rounds(folder: str) -> int:
    for number in range(ROUNDS):
        open_and_destroy(Path(folder), int(os.environ["RANK"]), number)
    return ROUNDS


def test_a_launched_function_opens_and_destroys_groups_in_a_loop(in_folder: Path) -> None:
    assert paceline.launch(rounds, ranks=2, folder=str(in_folder)) == ROUNDS


@pytest.mark.nightly
def test_a_script_in_fresh_interpreters_opens_and_destroys_groups_in_a_loop(in_folder: Path) -> None:
    """torch is imported after the rank has started."""
    code = f"""
import os, sys
assert "torch" not in sys.modules
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import test_group_shutdown
test_group_shutdown.rounds(os.getcwd())
"""
    (in_folder / "script.py").write_text(code)
    done = command("launch", "--fresh", "-n", "2", "script.py", cwd=in_folder)
    assert done.returncode == 0, done.stderr


def test_a_trainer_in_a_group_of_the_script_lets_it_be_destroyed_in_a_loop(tmp_path: Path) -> None:
    """As under torchrun: paceline has not started these ranks."""

    def body() -> None:
        rank = dist.get_rank()
        dist.destroy_process_group()
        for number in range(5):
            store = dist.FileStore(str(tmp_path / f"store-{number}"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            trainer = paceline.Trainer(torch.nn.Linear(8, 1), criterion=torch.nn.MSELoss(), batch=16, run=False)
            data = torch.utils.data.TensorDataset(torch.ones(64, 8), torch.ones(64, 1))
            trainer.train(data, epochs=1)
            dist.all_reduce(torch.zeros(2))
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "last"), 2), rank=rank, world_size=2)

    run_on_ranks(2, body)
