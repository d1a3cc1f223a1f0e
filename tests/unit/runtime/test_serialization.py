"""Plain values go into JSON and come back; what is not plain is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.run.history import History
from paceline.runtime.serialization import from_json, load_result, save_result, to_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(["$pairs", "$float", "$tensor"]), inner, max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(to_json(value, "here", tensors), allow_nan=False)
    return from_json(json.loads(text), tensors.__getitem__)


@settings(max_examples=40, deadline=None)
@given(PLAIN)
def test_plain_values_are_restored(value: Any) -> None:
    assert there_and_back(value) == value


def test_values_outside_json_are_restored() -> None:
    back = there_and_back({"loss": math.nan, "best": -math.inf, 3: [1, (2, 3)], "mean": torch.ones(2), (1): "a"})
    assert math.isnan(back["loss"]) and back["best"] == -math.inf
    assert back[3] == [1, [2, 3]] and back[1] == "a"
    assert torch.equal(back["mean"], torch.ones(2))


def test_tensors_are_named_by_where_they_are() -> None:
    tensors: dict[str, Tensor] = {}
    to_json({"a": [torch.zeros(1), {"b": torch.ones(1, requires_grad=True)}]}, "state", tensors)
    assert list(tensors) == ["state/a/0", "state/a/1/b"]
    assert not tensors["state/a/1/b"].requires_grad


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert there_and_back([numpy.float64(0.5), numpy.int32(3), numpy.bool_(True)]) == [0.5, 3, True]


def test_what_is_not_plain_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"state/hook can't be saved .* type object") as caught:
        to_json({"hook": object()}, "state", {})
    assert caught.value.code == "checkpoint.not-plain"


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": "nowhere"},
        {"$tensor": ["a"]},
        {"$float": "much"},
        {"$float": None},
        {"$pairs": 3},
        {"$pairs": [[1]]},
        {"$pairs": [[{}, 1]]},
    ],
    ids=str,
)
def test_an_invalid_value_is_reported_as_damage(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_json({"inside": [value]}, {}.__getitem__)
    assert caught.value.code == "checkpoint.damaged"


def test_keys_of_any_plain_type_are_restored() -> None:
    value = {(1, ("a", 2)): 1, 3: 2, None: 3, 1.5: 4}
    assert from_json(to_json(value, "state", {}), {}.__getitem__) == value


def test_tensors_with_colliding_paths_stay_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": {"b": torch.ones(2)}, "a/b": torch.zeros(2)}
    back = from_json(to_json(value, "metadata", tensors), tensors.__getitem__)
    assert torch.equal(back["a"]["b"], torch.ones(2)) and torch.equal(back["a/b"], torch.zeros(2))


def test_what_no_reader_would_follow_is_refused_when_it_is_saved() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(CheckpointError, match="64 levels"):
        to_json(deep, "metadata", {})


def through_files(value: Any, folder: Path) -> Any:
    save_result(value, folder, {"History": "paceline.run.history"})
    return load_result(folder, {"History": "paceline.run.history"})


@pytest.mark.parametrize(
    "value",
    [(1, ("x", [2.5])), {"$tuple": [1]}, {"$object": ["History", {}]}, {"$pairs": []}, {"a": {"b": None}}, math.inf],
    ids=str,
)
def test_a_result_comes_back_as_it_was(value: Any, tmp_path: Path) -> None:
    assert through_files(value, tmp_path) == value


def test_a_result_may_hold_a_history_and_tensors(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    back = through_files(
        {"run": History(steps=[{"step": 1, "loss": math.nan}]), "parts": (whole, whole[::2])}, tmp_path
    )
    assert isinstance(back["run"], History) and math.isnan(back["run"].steps[0]["loss"])
    assert [part.tolist() for part in back["parts"]] == [[0, 1, 2, 3], [0, 2]]


def test_a_result_may_not_choose_what_is_imported(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"$object": ["Popen", {}]}')
    with pytest.raises(KeyError):
        load_result(tmp_path)


def test_a_missing_result_is_none(tmp_path: Path) -> None:
    assert load_result(tmp_path) is None
