"""Another kind of store: it saves, resumes on another layout, verifies, exports and prunes as a folder does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from faults import saves
from memory_store import MemoryStore
from paceline import dist
from paceline.checkpoint.checkpoint_store import Address, CheckpointStore, Draft
from paceline.checkpoint.export import export
from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import candidates, open_checkpoint, verified, verify
from paceline.checkpoint.writer import Description, Writer, prune
from paceline.errors import CheckpointError
from paceline.run.folder import RunFolder
from paceline.train.checkpointing.entries import training_state
from paceline.train.checkpointing.restorer import Restorer
from paceline.train.checkpointing.run_handle import RunHandle
from paceline.train.checkpointing.saver import Saver
from worlds import run_on_ranks


def save(store: CheckpointStore, name: str, step: int = 1, **options: Any) -> Address:
    held = {path: LocalShard(tensor) for path, tensor in saves.values(step).items()}
    at = Address(store, name)
    return Writer().begin(at, held, Description(step, 0, True), **options).result().at


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "checkpoints")


def test_what_is_read_is_what_was_written(store: CheckpointStore) -> None:
    at = save(store, "step-000007", 7)
    assert saves.bits(saves.read_full(verify(at), "")) == saves.bits(saves.values(7))
    assert str(at) == store.where("step-000007") and store.where("step-000007").endswith("step-000007")


def test_the_newest_comes_first_and_retention_spares_the_best(store: CheckpointStore) -> None:
    for step in (10, 15, 20, 25):
        save(store, f"step-0000{step}", step)
        store.point("latest", [f"step-0000{step}"])
    store.point("best", ["step-000010"])
    assert [found.at.name[-2:] for found in candidates(store)] == ["25", "20", "15", "10"]
    assert prune(store, 1, 20) == ["step-000015"]
    assert [each.manifest.step for each in verified(store)] == [25, 20, 10]
    assert (store.pointer("best"), store.pointer("none")) == (["step-000010"], [])


def test_names_are_not_taken_twice_unless_that_is_asked_for(store: CheckpointStore) -> None:
    save(store, "a", 1)
    with pytest.raises(CheckpointError, match=r"checkpoint\.exists"):
        save(store, "a", 2)
    assert save(store, "a", 2, unique_name=True).name == "a-2"
    assert open_checkpoint(save(store, "a", 3, overwrite=True)).manifest.step == 3
    assert sorted(store.names()) == ["a", "a-2"]


def test_a_draft_is_invisible_until_its_commit_and_goes_with_the_leftovers(store: CheckpointStore) -> None:
    save(store, "step-000001")
    draft = store.create("step-000002", 10)
    with store.write(draft, "rank-0.safetensors") as write:
        write(memoryview(b"some"))
    assert list(store.names()) == ["step-000001"] and not store.files("step-000002")
    with pytest.raises(CheckpointError, match=r"checkpoint\.missing"):
        open_checkpoint(Address(store, "step-000002"))
    store.remove_leftovers()
    with pytest.raises((OSError, KeyError)):
        store.commit(Draft(*draft), {"manifest.json": b"{}"})
    assert list(store.names()) == ["step-000001"]


def test_damage_is_found_and_another_is_verified() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        save(store, f"step-00000{step}", step)
    content = store.objects["step-000003"]["rank-0.safetensors"]
    store.objects["step-000003"]["rank-0.safetensors"] = content[:-1] + bytes([content[-1] ^ 1])
    del store.objects["step-000002"]["rank-0.safetensors"]
    with pytest.raises(CheckpointError, match=r"memory://step-000003 is corrupted: .*hash mismatch"):
        verify(Address(store, "step-000003"))
    with pytest.raises(CheckpointError, match=r"is corrupted: rank-0\.safetensors: No such object"):
        open_checkpoint(Address(store, "step-000002"))
    assert [each.at.name for each in verified(store)] == ["step-000001"]


class RunElsewhere(RunHandle):
    """A run with a folder, and checkpoints in the memory of its first rank, which others do not have access to."""

    def __init__(self, trainer: Any, store: CheckpointStore, folder: Path) -> None:
        engine = trainer._engine
        super().__init__(engine.world, engine.log, "net", engine.position, lambda *_: None)
        self._store = store
        self.take(RunFolder(folder), engine.config)
        self.without_access = list(range(1, dist.world()))

    @property
    def store(self) -> CheckpointStore:
        return self._store


def parts(trainer: Any, store: CheckpointStore, folder: Path) -> tuple[RunHandle, Saver, Restorer]:
    run, engine = RunElsewhere(trainer, store, folder), trainer._engine
    state = training_state(engine, trainer._weights, trainer._policy, trainer._callbacks)
    saver = Saver(engine, state, run, trainer._callbacks)
    return run, saver, Restorer(engine, state, run, saver, trainer._rates)


@pytest.mark.parametrize("background", [True, False])
def test_a_run_saves_there_and_resumes_on_another_layout(tmp_path: Path, background: bool) -> None:
    run_on_ranks(2, lambda: save_and_resume(tmp_path, background))


def save_and_resume(folder: Path, background: bool) -> None:
    def made(strategy: str) -> Any:
        settings: dict[str, Any] = {"ema": 0.9, "keep": 1, "checkpoint": {"background": background}}
        return tiny.classifier_trainer(strategy=strategy, run=False, **settings)

    store, first, second = MemoryStore(), made("fsdp"), made("ddp")
    (folder / "r").mkdir(exist_ok=True)
    run, saver, _ = parts(first, store, folder / "r")
    for step in (2, 4):
        first.train(tiny.blobs(), max_steps=step)
        saver.save(step)
        saver.finish()
    saver.close()
    run.release()
    assert list(store.names()) == (["step-000004"] if dist.rank() == 0 else [])
    assert store.pointer("latest") == list(store.names())
    _, _, restorer = parts(second, store, folder / "r")
    restorer.resume()
    assert (second.step_count, restorer.loaded.step) == (4, 4)
    saved, restored = first.state_dict(), second.state_dict()
    for name, tensor in saved.items():
        assert torch.equal(tensor.cpu(), restored[name].cpu())
    if dist.rank() == 0:
        count = export(Address(store, "step-000004"), "safetensors", folder / "out.safetensors")
        exported = load_file(folder / "out.safetensors")
        assert count and all(torch.equal(tensor, saved[name].cpu()) for name, tensor in exported.items())
        (folder / "out.safetensors").unlink()
    second.train(tiny.blobs(), max_steps=5)
    assert second.step_count == 5
