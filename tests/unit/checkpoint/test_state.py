from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.local_store import locate
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.state import StateEntry, TrainingState
from paceline.checkpoint.writer import Description, Writer
from paceline.errors import CheckpointError
from small_checkpoints import flip_a_bit

LAYOUT = {"ranks": 1}


class Part:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def training_state(*entries: StateEntry, rank: int = 0, layout: dict[str, Any] = LAYOUT) -> TrainingState:
    return TrainingState(entries, rank=rank, layout=layout)


def save(folder: Path, state: TrainingState, metadata: Any = None, **options: Any) -> Checkpoint:
    snapshot = state.capture(metadata, **options)
    described = Description(
        step=1, epoch=0, optimizer=True, layout=LAYOUT, state=snapshot.values, metadata=snapshot.metadata
    )
    Writer().begin(locate(folder / "c"), snapshot.tensors, described, volatile=snapshot.volatile).result()
    return open_checkpoint(locate(folder / "c"))


def load(state: TrainingState, checkpoint: Checkpoint, **options: Any) -> Any:
    loaded = state.read(checkpoint, **options)
    state.apply(loaded)
    return loaded.metadata


def test_an_entrys_key_is_its_name_in_the_manifest_and_the_prefix_of_its_tensors(tmp_path: Path) -> None:
    state = training_state(StateEntry("mine", Part({"mean": torch.ones(2), "count": 3})))
    manifest = save(tmp_path, state).manifest
    assert list(manifest.tensors) == ["mine/mean"]
    assert manifest.state == {"mine": {"mean": {"$tensor": "mine/mean"}, "count": 3}}


def test_plain_values_tensors_and_metadata_are_restored(tmp_path: Path) -> None:
    saved = {"mean": torch.arange(3.0), 3: [float("inf"), None]}
    checkpoint = save(tmp_path, training_state(StateEntry("a", Part(saved))), {"of": torch.ones(1)})
    part = Part()
    metadata = load(training_state(StateEntry("a", part)), checkpoint)
    assert torch.equal(part.state["mean"], torch.arange(3.0)) and part.state[3] == [float("inf"), None]
    assert torch.equal(metadata["of"], torch.ones(1))


def test_a_key_that_begins_as_another_does_is_not_read_with_it(tmp_path: Path) -> None:
    checkpoint = save(
        tmp_path,
        training_state(StateEntry("a", Part({"x": torch.ones(1)})), StateEntry("ab", Part({"x": torch.ones(2)}))),
    )
    loaded = training_state(StateEntry("a", Part())).read(checkpoint)
    assert list(loaded.tensors) == ["a/x"]


def test_no_part_is_changed_unless_every_entry_was_verified(tmp_path: Path) -> None:
    state = training_state(StateEntry("first", Part(1)), StateEntry("second", Part({"x": torch.zeros(4)})))
    checkpoint = save(tmp_path, state)
    flip_a_bit(tmp_path / "c")
    first, second = Part("own"), Part("own")
    with pytest.raises(CheckpointError, match=r"checkpoint\.damaged.*second/x"):
        load(training_state(StateEntry("first", first), StateEntry("second", second)), checkpoint)
    assert first.state == second.state == "own"


def test_a_checkpoint_without_an_entry_is_refused_or_leaves_the_part_as_it_is(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, training_state(StateEntry("old", Part(1))))
    part, old = Part("own"), Part()
    load(training_state(StateEntry("old", old), StateEntry("new", part, if_absent="keep")), checkpoint)
    assert (old.state, part.state) == (1, "own")
    with pytest.raises(CheckpointError, match=r"checkpoint\.other-format.*no state of new"):
        load(training_state(StateEntry("new", part)), checkpoint)


def test_a_saved_none_is_not_an_absent_entry(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, training_state(StateEntry("a", Part(None))))
    part = Part("own")
    load(training_state(StateEntry("a", part, if_absent="keep")), checkpoint)
    assert part.state is None


def test_weights_only_loads_the_entries_of_that_scope(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, training_state(StateEntry("a", Part(1), scope="weights"), StateEntry("b", Part(2))))
    a, b = Part(), Part()
    load(training_state(StateEntry("a", a, scope="weights"), StateEntry("b", b)), checkpoint, weights_only=True)
    assert (a.state, b.state) == (1, None)


def test_an_entry_that_was_left_out_is_left_out_when_loading(tmp_path: Path) -> None:
    def state(part: Part) -> TrainingState:
        return training_state(StateEntry("a", Part(1)), StateEntry("b", part))

    checkpoint = save(tmp_path, state(Part(2)), without=["b"])
    part = Part("own")
    assert list(checkpoint.manifest.state) == ["a"]
    load(state(part), checkpoint, without=["b"])
    assert part.state == "own"


def test_only_rank_0_saves_what_ranks_share_and_each_its_own() -> None:
    entries = (
        StateEntry("shared", Part({"x": torch.ones(1)})),
        StateEntry("own", Part({"y": torch.ones(1)}), per_rank=True),
    )
    first, second = (training_state(*entries, rank=rank).capture() for rank in (0, 1))
    assert list(first.tensors) == ["shared/x", "own/rank-0/y"] and list(second.tensors) == ["own/rank-1/y"]
    assert first.values == second.values


@pytest.mark.parametrize(
    ("layout", "found"), [(LAYOUT, {"y": torch.ones(1)}), ({"ranks": 2}, {})], ids=["same", "other"]
)
def test_state_of_each_rank_is_restored_on_the_same_layout(
    tmp_path: Path, layout: dict[str, Any], found: dict[str, torch.Tensor]
) -> None:
    checkpoint = save(tmp_path, training_state(StateEntry("own", Part({"y": torch.ones(1)}), per_rank=True)))
    part = Part("own")
    load(training_state(StateEntry("own", part, per_rank=True), layout=layout), checkpoint)
    assert part.state == found


def test_only_volatile_tensors_are_copied_before_the_save_returns() -> None:
    entries = (StateEntry("a", Part({"x": torch.ones(1)})), StateEntry("b", Part({"x": torch.ones(1)}), volatile=False))
    assert training_state(*entries).capture().volatile == {"a/x"}


def test_two_entries_of_one_key_are_refused() -> None:
    for keys in (("a", "a"), ("a", "metadata")):
        with pytest.raises(AssertionError, match="same key"):
            training_state(*(StateEntry(key, Part()) for key in keys))
