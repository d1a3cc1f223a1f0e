"""Guides that have people export a machine's first rank: plain `python train.py` with `paceline.launch` inside."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path

import torch

import nodes
import paceline
from paceline import dist


def machine(first_rank: int, port: int, folder: Path) -> None:
    """What a person does on each of two machines, which are processes here."""
    exported = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4", "RANK": str(first_rank)}
    os.environ.update(exported, HOME=str(folder), PACELINE_TOKEN="the token of this test")

    def total() -> list[float]:
        tensor = torch.tensor([dist.rank() + 1.0])
        dist.all_reduce(tensor)
        return [*tensor.tolist(), dist.world(), dist.local_rank()]

    result = paceline.launch(total, ranks=2)
    (folder / str(first_rank)).write_text(str(result))


def test_an_exported_first_rank_makes_the_ranks_of_two_machines_one_world(tmp_path: Path) -> None:
    port = nodes.reserve_ports()
    machines = [get_context("fork").Process(target=machine, args=(rank, port, tmp_path)) for rank in (0, 2)]
    for process in machines:
        process.start()
    for process in machines:
        process.join(60)
        process.terminate()  # where it hangs; it ends its ranks
    assert (tmp_path / "0").read_text() == "[10.0, 4, 0]"
    assert (tmp_path / "2").read_text() == "None"  # rank 0 was on the other
