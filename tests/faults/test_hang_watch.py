"""A hang without a launcher of ours: rank 0 tells what it can see."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.utils.data import Dataset

import nodes
import paceline
from paceline import dist
from paceline.diagnose.hang import rank_monitor
from paceline.diagnose.hang.barrier import Call, Post
from paceline.diagnose.hang.progress_limits import NoProgress
from paceline.runtime import environment
from paceline.train.hang_monitor import describe

FILE = Path(__file__).name
FOUND = NoProgress(2.5, 2.0, "at least 2 s", "training")
MOVES = Post(1, Call("", 0, "", "", []), False, "", False, False, False, False, 8, {}, [])
STANDS = MOVES._replace(stalled=True)
READS = [("read_image", "/home/me/data.py", 88), ("micros", "/x/site-packages/paceline/data/loader.py", 10)]
WAITS = [("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 20), ("<module>", "/home/me/a.py", 7)]
COMPUTES = [("callback", "/home/me/a.py", 9)]


class Stuck(Dataset[Any]):
    """Reading a sample of the last step but one takes until a condition is met. By then there is a history of steps,
    but there were not many in which a machine under load could seem to hang."""

    def __init__(self, until: Callable[[], bool]) -> None:
        self.until, self.read = until, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read == 28:
            wait_until(self.until)
        return torch.zeros(4), torch.tensor(0)


def wait_until(condition: Callable[[], bool]) -> None:
    nodes.eventually(condition)


def train(log: Path) -> None:
    """What a rank of torchrun does, with its messages in a file."""
    del os.environ[environment.LAUNCHED]
    logging.getLogger("paceline").addHandler(logging.FileHandler(log, delay=True))
    trainer = paceline.Trainer(nn.Linear(4, 2), criterion=nn.CrossEntropyLoss(), batch=8, run=False, quiet=True)
    trainer.train(Stuck(lambda: dist.rank() == 0 or "without paceline launch" in text_of(log)), epochs=1)
    wait_until(lambda: "progress again" in text_of(log))


def text_of(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_rank_0_names_the_rank_that_others_wait_for_and_says_what_it_cannot_see(tmp_path: Path) -> None:
    paceline.launch(lambda: train(tmp_path / "log"), ranks=2)
    text = text_of(tmp_path / "log")
    assert text.startswith("rank 1 keeps the others waiting (step ")
    assert "it is in eventually() at nodes.py:" in text
    assert f", inside trainer.train() at {FILE}:" in text
    assert ", reading a batch\n" in text
    assert "\nrank 0 has waited for" in text
    assert f"s, in trainer.train() at {FILE}:" in text
    assert text.count("usual causes:") == text.count("what to do:") == 1
    assert "a rank that holds the GIL or is stopped can't be located" in text
    assert "ranks make progress again, after" in text


def test_a_rank_whose_threads_do_not_run_is_named_without_its_line() -> None:
    text = describe(FOUND, 3, {0: STANDS, 2: STANDS}, {0: WAITS, 2: WAITS}, 17)
    assert text.startswith("all other ranks wait for rank 1 (step 17): its threads don't answer: it holds the GIL")
    assert "ranks 0 and 2 have waited for 2.5 s, in torch.distributed.all_reduce() at a.py:7" in text


def test_ranks_that_all_wait_for_their_data_are_named() -> None:
    text = describe(FOUND, 2, {0: STANDS, 1: STANDS}, {0: READS, 1: READS}, 17)
    assert "ranks 0 and 1: are in read_image() at data.py:88, reading a batch" in text


def test_a_rank_that_has_ended_is_named() -> None:
    ended = MOVES._replace(place="has returned", ended=True)
    assert describe(FOUND, 2, {0: STANDS, 1: ended}, {0: WAITS}, 17).startswith("rank 1 has returned, but other ranks")


def test_nothing_is_said_while_a_rank_moves_or_all_compute_or_one_is_debugged() -> None:
    debugged = [("interaction", "/usr/lib/python3.11/pdb.py", 1), *READS]
    assert not describe(FOUND, 2, {0: STANDS, 1: MOVES}, {0: WAITS, 1: []}, 17)
    assert not describe(FOUND, 2, {0: STANDS, 1: STANDS}, {0: COMPUTES, 1: COMPUTES}, 17)
    assert not describe(FOUND, 2, {0: STANDS, 1: STANDS}, {0: WAITS, 1: debugged}, 17)


def test_threads_end_silently_with_the_process_group() -> None:
    def body() -> None:
        del os.environ[environment.LAUNCHED]
        raised: list[object] = []
        threading.excepthook = raised.append
        paceline.Trainer(nn.Linear(4, 2), criterion=nn.CrossEntropyLoss(), run=False, quiet=True)
        torch_dist.destroy_process_group()
        wait_until(lambda: not rank_monitor.current()._attached)
        assert not raised

    paceline.launch(body, ranks=2)
