"""A scheduled save does not make training wait for a slow disk: a later step is saved instead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import dist
from paceline.checkpoint import host_copy
from paceline.checkpoint.checkpoint_store import step_name
from paceline.checkpoint.local_store import Filesystem
from paceline.train import rank_poll
from paceline.train.checkpointing import saver
from resumable import Net, points, trainer
from worlds import ranks


class Held:
    """Blocks an operation, a disk's or an allocation, from its first call until training has reached a step."""

    def __init__(self, until: int) -> None:
        self._until, self._reached = until, threading.Event()
        self.saved: list[int] = []
        self.waited_in_vain = False

    def wait(self) -> None:
        self.waited_in_vain |= not self._reached.wait(40)

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()

    def on_step(self, record: Any) -> None:
        if record.step == self._until:
            self._reached.set()

    def on_save(self, record: Any) -> None:
        self.saved.append(record.step)


def with_slow_disk(patch: pytest.MonkeyPatch, until: int) -> Held:
    held, sync = Held(until), Filesystem.sync

    def slow(self: Filesystem, descriptor: int) -> None:
        if dist.rank() == 0:
            held.wait()
        sync(self, descriptor)

    patch.setattr(Filesystem, "sync", slow)
    patch.setattr(saver.Saver, "prepare", lambda self: None)  # the first save allocates its memory itself
    postponing(patch)
    return held


def postponing(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint of any size counts as large, and ranks look for a finished write after every step."""
    patch.setattr(saver, "_SHORT_WAIT", 0)
    patch.setattr(rank_poll, "_INTERVAL", 0.0)


@pytest.mark.parametrize("size", [1, 2])
def test_training_continues_while_a_disk_is_slow_and_every_rank_saves_the_same_later_step(
    tmp_path: Path, size: int
) -> None:
    @ranks(size)
    def body() -> None:
        with pytest.MonkeyPatch.context() as patch:
            held = with_slow_disk(patch, until=9)
            one = trainer(lambda: Net(norm=True), run=str(tmp_path / "r"), save_every=3, keep=None, callbacks=[held])
            one.train(points(), max_steps=30)
        assert not held.waited_in_vain
        first, second, *_ = held.saved
        assert first == 3 and second >= 9 and held.saved[-1] == 30
        reference, loaded = trainer(lambda: Net(norm=True)), trainer(lambda: Net(norm=True))
        reference.train(points(), max_steps=second)
        loaded.load_checkpoint(tmp_path / "r" / "checkpoints" / step_name(second))
        expected, found = reference.state_dict(), loaded.state_dict()
        if dist.is_main():  # whose buffers are saved
            assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []

    body()


def test_steps_to_keep_forever_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postponing(monkeypatch)
    one = trainer(run=str(tmp_path / "r"), save_every=2, keep=1, keep_every=4)
    one.train(points(), max_steps=13)
    names = {path.name for path in (tmp_path / "r" / "checkpoints").iterdir()}
    assert {step_name(step) for step in (4, 8, 12, 13)} <= names


def test_a_save_that_was_postponed_until_the_end_is_done_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = with_slow_disk(monkeypatch, until=8)
    one = trainer(run=str(tmp_path / "r"), save_every=3, save_last=False, keep=None, callbacks=[held])
    one.train(points(), max_steps=8)
    assert not held.waited_in_vain
    assert held.saved == [3, 8]


def test_a_save_whose_memory_is_not_allocated_yet_is_postponed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory, which only a GPU needs, takes a second."""
    held = Held(until=7)
    monkeypatch.setattr(host_copy.HostCopy, "is_ready", property(lambda self: held.is_reached))
    postponing(monkeypatch)
    one = trainer(run=str(tmp_path / "r"), save_every=3, save_last=False, keep=None, callbacks=[held])
    one.train(points(), max_steps=20)
    assert 7 <= held.saved[0] < 12


def test_many_saves_use_the_memory_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_poll, "_INTERVAL", 0.0)
    used: list[int] = []

    class Used:
        def on_save(self, record: Any) -> None:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            used.append(pages * 4096)

    size = 8 << 20
    one = trainer(lambda: Wide(size // 8), run=str(tmp_path / "r"), save_every=1, keep=1, callbacks=[Used()])
    one.train(points(), max_steps=10)
    assert used[-1] - used[2] < 2 * size  # one buffer for each save would be seven


class Wide(Net):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + self.wide.mean()
