from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from paceline import dist
from paceline.checkpoint import host_copy
from paceline.checkpoint.local_store import Filesystem
from paceline.errors import CheckpointError
from resumable import Stream, points, trainer
from worlds import ranks


def test_a_late_copy_holds_the_weights_and_not_the_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the save of an epoch's last step comes its evaluation, with the averages in the model's place."""
    settled, at_once, drop_inherited_options = threading.Event(), host_copy._copy_all, host_copy.HostCopy.wait_for_copy

    def late(pairs: Any) -> None:
        settled.wait(60)
        at_once(pairs)

    def settling(copy: Any) -> None:
        settled.set()
        drop_inherited_options(copy)

    monkeypatch.setattr(host_copy, "_cores_are_busy", lambda: False)
    monkeypatch.setattr(host_copy, "_copy_all", late)
    monkeypatch.setattr(host_copy.HostCopy, "wait_for_copy", settling)
    trainer(ema=0.9, run=str(tmp_path / "r"), save_every=8, keep=None).train(Stream(), points(8), max_steps=10)
    reference, other = trainer(ema=0.9), trainer(ema=0.9)
    reference.train(Stream(), max_steps=8)
    other.load_checkpoint(tmp_path / "r" / "checkpoints" / "step-000008")
    assert torch.equal(other.model.first.weight, reference.model.first.weight)


def test_nothing_is_saved_or_loaded_inside_the_averages(tmp_path: Path) -> None:
    one = trainer(ema=0.9)
    one.train(points(), max_steps=2)
    one.save_checkpoint(tmp_path / "c")
    with one.ema_weights():
        for call in (lambda: one.save_checkpoint(tmp_path / "d"), lambda: one.load_checkpoint(tmp_path / "c")):
            with pytest.raises(CheckpointError, match=r"checkpoint\.inside-ema"):
                call()


def test_metadata_that_would_not_be_read_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.too-much-metadata"):
        trainer().save_checkpoint(tmp_path / "c", metadata={"losses": [0.1234567] * 600_000})
    assert list(tmp_path.iterdir()) == []


def test_the_best_step_is_saved_again_where_its_first_save_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of data without a length end behind the save of their last step: the best one is known after it."""
    create, failures = Filesystem.create, [1]

    def fails_once(self: Filesystem, path: Path) -> int:
        if "step-000016" in str(path) and failures:
            failures.pop()
            raise OSError(28, "No space left on device")
        return create(self, path)

    monkeypatch.setattr(Filesystem, "create", fails_once)
    one = trainer(run=str(tmp_path / "r"), save_every=8, save_best=True, keep=None)
    one.train(Stream(), points(8), epochs=3)
    checkpoints = tmp_path / "r" / "checkpoints"
    assert not failures
    [best] = (checkpoints / "best").read_text().split()
    assert (checkpoints / best / "manifest.json").exists()
    assert int(best.removeprefix("step-")) == min(evaluations(tmp_path), key=lambda each: each["loss"])["step"]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("evaluation")]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    metric = tiny.ScriptedMetric({0: [0.1, 0.9, 0.5, 0.2]})
    trainer = tiny.classifier_trainer(
        metrics={"score": metric}, save_best="score", save_every=5, keep=1, run=str(tmp_path / "r")
    )
    trainer.train(tiny.blobs(), tiny.blobs(), epochs=4)
    assert checkpoints(tmp_path / "r") == ["step-000006", "step-000012"]
    assert (tmp_path / "r" / "checkpoints" / "best").read_text() == "step-000006\n"
    assert (tmp_path / "r" / "checkpoints" / "latest").read_text() == "step-000012\n"
    best = tiny.classifier_trainer()
    best.load_checkpoint(tmp_path / "r" / "checkpoints" / "step-000006")
    assert best.step_count == 6


def test_without_save_last_only_the_best_is_kept(tmp_path: Path) -> None:
    trainer = tiny.classifier_trainer(save_best=True, save_last=False, keep=1, run=str(tmp_path / "r"))
    trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    assert len(checkpoints(tmp_path / "r")) == 1


def test_a_step_is_saved_once_and_every_rank_gets_the_same_name(tmp_path: Path) -> None:
    @ranks(2)
    def body() -> None:
        heard: list[str] = []

        class Saves:
            def on_save(self, record: Any) -> None:
                heard.append(record.folder)

        trainer = tiny.classifier_trainer(save_every=3, run=str(tmp_path / "r"), callbacks=[Saves()])
        trainer.train(tiny.blobs(), epochs=2)
        assert [Path(folder).name for folder in heard] == ["step-000003", "step-000006"]
        assert all(Path(folder).is_dir() for folder in heard) or dist.rank() == 1

    body()
    assert checkpoints(tmp_path / "r") == ["step-000003", "step-000006"]
