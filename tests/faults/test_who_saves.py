"""`save_checkpoint` and `load_checkpoint` on all ranks, on the first alone, or on the wrong ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import nodes
import tiny
from faults import worlds
from paceline import Trainer
from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.reader import verified
from paceline.errors import PacelineError
from paceline.parallel.shards import local_shard
from paceline.runtime.collective_check import current_board

LATER = pytest.mark.nightly
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "tp"},
    "pipeline": {"strategy": "pp"},
}


def trained(**settings: Any) -> Trainer:
    trainer = tiny.classifier_trainer(**{"strategy": "ddp", **settings})
    trainer.train(tiny.blobs(), max_steps=2)
    return trainer


def weights_of(trainer: Trainer) -> list[float]:
    return tiny.weights(trainer).tolist()


def hears(call: Callable[[], Any]) -> str:
    """What it says, on the ranks that call it."""
    try:
        call()
    except PacelineError as error:
        return str(error)
    return ""


def is_elsewhere(rank: int) -> bool:
    """Whether it has told that it is outside of the Trainer's methods. It may be the last to leave one, and tells where
    it is only now and then."""
    post = current_board().read_post(rank)
    return post is not None and "trainer." not in post.place


def this_rank() -> int:
    return int(os.environ["RANK"])


def test_with_ddp_the_first_rank_may_save_alone_or_with_the_others(tmp_path: Path) -> None:
    def body() -> list[float]:
        trainer = trained()
        expected = weights_of(trainer)
        if trainer.is_main_process:
            trainer.save_checkpoint(tmp_path / "alone")  # the other rank is not there: it waits below
        torch_dist.barrier()
        trainer.save_checkpoint(tmp_path / "all")
        for name in ("alone", "all"):
            again = tiny.classifier_trainer(strategy="ddp")
            again.load_checkpoint(tmp_path / name)
            assert weights_of(again) == expected and again.step_count == 2
        return expected

    first, second = worlds.values(2, body)
    assert first == second


@pytest.mark.parametrize(
    ("layout", "caller"),
    [
        ("fsdp", 1), ("tensor", 0), ("pipeline", 1),
        pytest.param("fsdp", 0, marks=LATER), pytest.param("tensor", 1, marks=LATER),
        pytest.param("pipeline", 0, marks=LATER),
    ],
)  # fmt: skip
def test_with_sharded_weights_a_missing_rank_is_named(tmp_path: Path, layout: str, caller: int) -> None:
    def body() -> str:
        trainer = tiny.trainer_of(
            tiny.recipe("gpt", **LAYOUTS[layout], checkpoint={"wait": 60.0}, train={"max_steps": 1}, batch=8)
        )
        trainer.train()
        heard = ""
        if this_rank() == caller:
            nodes.eventually(lambda: is_elsewhere(1 - caller))
            heard = hears(lambda: trainer.save_checkpoint(tmp_path / "alone"))
        torch_dist.barrier()
        trainer.save_checkpoint(tmp_path / "all")  # who was refused can still come with the others
        return heard

    heard = worlds.values(2, body)
    assert heard[1 - caller] == ""
    assert f"[world.different-calls] Rank {caller} called trainer.save_checkpoint()" in heard[caller]
    assert [checkpoint.at.name for checkpoint in verified(LocalStore(tmp_path))] == ["all"]


def test_a_rank_that_does_not_come_in_time_is_named(tmp_path: Path) -> None:
    """It computes, so it may still come: only the end of the time says that it does not."""

    def body() -> str:
        trainer, heard = trained(strategy="fsdp", checkpoint={"wait": 1.0}), ""
        if this_rank() == 0:
            heard = hears(lambda: trainer.save_checkpoint(tmp_path / "alone"))
            (tmp_path / "heard").touch()
        nodes.eventually((tmp_path / "heard").exists)
        return heard

    assert "[world.different-calls] Rank 0 called trainer.save_checkpoint()" in worlds.values(2, body)[0]


@pytest.mark.parametrize(
    ("strategy", "caller"),
    [("ddp", 0), ("fsdp", 1), pytest.param("ddp", 1, marks=LATER), pytest.param("fsdp", 0, marks=LATER)],
)
def test_a_load_on_one_rank_only_is_refused(tmp_path: Path, strategy: str, caller: int) -> None:
    def body() -> str:
        trainer = trained(strategy=strategy)
        trainer.save_checkpoint(tmp_path / "saved")
        before = [local_shard(parameter).detach().clone() for parameter in trainer.model.parameters()]
        heard = ""
        if this_rank() == caller:
            nodes.eventually(lambda: is_elsewhere(1 - caller))
            heard = hears(lambda: trainer.load_checkpoint(tmp_path / "saved"))
        torch_dist.barrier()
        after = map(local_shard, trainer.model.parameters())  # to compare sharded tensors is a collective
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return heard

    heard = worlds.values(2, body)
    assert f"[world.different-calls] Rank {caller} called trainer.load_checkpoint()" in heard[caller]


def test_ranks_that_do_different_things_do_not_take_each_other_for_partners(tmp_path: Path) -> None:
    def body() -> str:
        trainer = trained(strategy="fsdp", checkpoint={"wait": 60.0})
        trainer.save_checkpoint(tmp_path / "saved")
        if this_rank() == 0:
            return hears(lambda: trainer.save_checkpoint(tmp_path / "again"))
        return hears(lambda: trainer.load_checkpoint(tmp_path / "saved"))

    heard = worlds.values(2, body)
    for text in heard:
        assert "rank 0: trainer.save_checkpoint() at test_who_saves.py:" in text
        assert "rank 1: trainer.load_checkpoint() at test_who_saves.py:" in text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_of_different_paths_the_first_ranks_counts(tmp_path: Path, strategy: str) -> None:
    def body() -> None:
        trained(strategy=strategy).save_checkpoint(tmp_path / f"of-{this_rank()}")

    worlds.values(2, body)
    assert [checkpoint.at.name for checkpoint in verified(LocalStore(tmp_path))] == ["of-0"]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=LATER), "fsdp"])
def test_ranks_that_load_different_checkpoints_are_refused(tmp_path: Path, strategy: str) -> None:
    def body() -> str:
        trainer = trained(strategy=strategy)
        trainer.save_checkpoint(tmp_path / "0")
        trainer.train(tiny.blobs(), max_steps=4)
        trainer.save_checkpoint(tmp_path / "1")
        before = weights_of(trainer) if strategy == "ddp" else []
        heard = hears(lambda: trainer.load_checkpoint(tmp_path / str(this_rank())))
        assert not before or weights_of(trainer) == before
        return heard

    for heard in worlds.values(2, body):
        assert "[checkpoint.ranks-differ] Ranks load different checkpoints" in heard and "on rank 1." in heard


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=LATER), "fsdp"])
def test_save_checkpoint_works_beside_scheduled_saves(tmp_path: Path, strategy: str) -> None:
    """From a callback, while the last scheduled one is still being written."""

    class Saves:
        def on_step(self, record: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"own-{record.step}")

    trainer: Trainer

    def body() -> None:
        nonlocal trainer
        run = str(tmp_path / "r")
        trainer = tiny.classifier_trainer(strategy=strategy, run=run, save_every=1, keep=None, callbacks=[Saves()])
        trainer.train(tiny.blobs(), max_steps=6)

    worlds.values(2, body)
    assert (
        len(list(verified(LocalStore(tmp_path))))
        == len(list(verified(LocalStore(tmp_path / "r" / "checkpoints"))))
        == 6
    )
