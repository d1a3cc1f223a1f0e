"""Weights that other programs saved."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch

from paceline.checkpoint.external import WRAPPERS, load_external_weights
from paceline.errors import CheckpointError

WEIGHTS = {"body.weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7), "half": torch.ones(2).bfloat16()}


def saved(folder: Path, content: Any, name: str = "file.pt", **options: Any) -> Path:
    torch.save(content, folder / name, **options)
    return folder / name


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[name].equal(other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_external_weights(path)
    return caught.value


@pytest.mark.parametrize("is_archive", [True, False], ids=["zip", "before 1.6"])
def test_a_bare_state_dict_is_loaded_unchanged(tmp_path: Path, is_archive: bool) -> None:
    brought = load_external_weights(saved(tmp_path, WEIGHTS, "file.pth", _use_new_zipfile_serialization=is_archive))
    assert same(brought.weights, WEIGHTS) and brought.metadata == {}


@pytest.mark.parametrize("key", WRAPPERS)
def test_a_dict_around_a_state_dict_gives_its_plain_values_as_metadata(tmp_path: Path, key: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    around = {"epoch": 3, "accuracy": torch.tensor(0.5), "options": {"widths": [1, 2], "name": None}}
    brought = load_external_weights(saved(tmp_path, {**around, key: WEIGHTS, "optimizer": optimizer.state_dict()}))
    assert same(brought.weights, WEIGHTS)
    assert brought.metadata == {**around, "accuracy": 0.5}


def test_dicts_around_dicts_are_opened(tmp_path: Path) -> None:
    brought = load_external_weights(saved(tmp_path, {"state_dict": {"model": WEIGHTS, "epoch": 1}, "step": 9}))
    assert same(brought.weights, WEIGHTS) and brought.metadata == {"epoch": 1, "step": 9}


def test_the_model_goes_before_its_average(tmp_path: Path) -> None:
    average = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    assert same(load_external_weights(saved(tmp_path, {"ema": average, "model": WEIGHTS})).weights, WEIGHTS)


@pytest.mark.parametrize("front", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."])
def test_prefixes_of_wrappers_go(tmp_path: Path, front: str) -> None:
    brought = load_external_weights(saved(tmp_path, {front + name: tensor for name, tensor in WEIGHTS.items()}))
    assert same(brought.weights, WEIGHTS)


def test_a_compiled_part_within_a_model_has_its_name_back(tmp_path: Path) -> None:
    names = {"encoder._orig_mod.0._checkpoint_wrapped_module.w": torch.ones(1), "head.w": torch.ones(1)}
    assert set(load_external_weights(saved(tmp_path, names)).weights) == {"encoder.0.w", "head.w"}


def test_a_part_that_the_model_itself_calls_module_stays(tmp_path: Path) -> None:
    names = {"module.w": torch.ones(1), "head.module.w": torch.ones(1)}
    assert set(load_external_weights(saved(tmp_path, names)).weights) == set(names)


def test_two_weights_that_would_get_one_name_are_refused(tmp_path: Path) -> None:
    names = {"a._orig_mod.w": torch.ones(1), "a.w": torch.zeros(1)}
    assert refusal(saved(tmp_path, names)).code == "checkpoint.no-weights"


def test_a_checkpoint_of_a_wrapped_model_loads_into_a_bare_one(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    wrapped = torch.nn.DataParallel(model)
    brought = load_external_weights(saved(tmp_path, {"model_state_dict": wrapped.state_dict(), "epoch": 1}))
    model.load_state_dict(brought.weights)


def test_a_safetensors_file_is_loaded_with_its_metadata_and_tied_names(tmp_path: Path) -> None:
    notes = {"format": "pt", "head.weight": "body.weight"}
    safetensors.torch.save_file(WEIGHTS, tmp_path / "file.safetensors", metadata=notes)
    brought = load_external_weights(tmp_path / "file.safetensors")
    assert set(brought.weights) == {*WEIGHTS, "head.weight"} and brought.metadata == {"format": "pt"}
    assert brought.weights["head.weight"] is brought.weights["body.weight"]


@pytest.mark.parametrize("is_archive", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize(
    ("content", "named"),
    [(torch.nn.Linear(2, 2), "Linear"), ({"model": WEIGHTS, "args": argparse.Namespace(lr=1)}, "argparse.Namespace")],
    ids=["a whole model", "options beside weights"],
)
def test_a_file_that_needs_code_is_refused_by_name(tmp_path: Path, content: Any, named: str, is_archive: bool) -> None:
    error = refusal(saved(tmp_path, content, _use_new_zipfile_serialization=is_archive))
    assert error.code == "checkpoint.needs-code" and named in error.what


class Hostile:
    """Unpickled, it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": WEIGHTS, "extra": Hostile(tmp_path / "mark")})
    assert refusal(path).code == "checkpoint.needs-code"
    assert not (tmp_path / "mark").exists()


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("file/constants.pkl", b"\x80\x02).")
    assert refusal(tmp_path / "file.pt").code == "checkpoint.needs-code"


@pytest.mark.parametrize("is_archive", [True, False], ids=["zip", "before 1.6"])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, is_archive: bool) -> None:
    path = saved(tmp_path, WEIGHTS, _use_new_zipfile_serialization=is_archive)
    whole = path.read_bytes()
    # Without a list of its parts at the end, half a name at the end of a file is a name that is not known.
    codes = {"checkpoint.unreadable"} | (set() if is_archive else {"checkpoint.needs-code"})
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        assert refusal(path).code in codes


def test_a_flipped_bit_of_a_weight_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(5000)})
    content = bytearray(path.read_bytes())
    content[content.index(bytes(4000)) + 2000] ^= 1
    path.write_bytes(content)
    error = refusal(path)
    assert error.code == "checkpoint.unreadable" and "corrupted" in error.what


def test_no_damaged_archive_gives_other_weights_or_an_error_without_a_code(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": WEIGHTS, "epoch": 3})
    whole, random = path.read_bytes(), Random(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for place in random.sample(range(len(whole)), random.choice([1, 8])):
            content[place] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        try:
            assert same(load_external_weights(path).weights, WEIGHTS)  # what was hit has no meaning, such as padding
        except CheckpointError:
            refused += 1
    assert refused > 300


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, WEIGHTS)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(load_external_weights(path).weights, WEIGHTS)


def test_a_file_without_weights_has_a_code(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello, world")
    (tmp_path / "text.safetensors").write_text("hello, world")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("x", "not torch's")
    for name in ("text.pt", "text.safetensors", "zip.pt", "."):
        assert refusal(tmp_path / name).code == "checkpoint.unreadable"
    assert refusal(tmp_path / "nowhere.pt").code == "checkpoint.missing"


@pytest.mark.parametrize(
    "content",
    [[1, 2], torch.ones(3), {}, {"epoch": 3}, {"mine": WEIGHTS}, {0: torch.ones(1)}],
    ids=["a list", "a tensor", "nothing", "numbers", "an unknown key", "numbered"],
)
def test_a_torch_file_without_weights_says_what_it_holds(tmp_path: Path, content: Any) -> None:
    error = refusal(saved(tmp_path, content))
    assert error.code == "checkpoint.no-weights" and (type(content).__name__ in error.what or "keys are" in error.what)


def test_absurd_nesting_has_a_code(tmp_path: Path) -> None:
    nested: dict[str, Any] = dict(WEIGHTS)
    for _ in range(20):
        nested = {"model": nested}
    assert refusal(saved(tmp_path, nested)).code == "checkpoint.no-weights"
    with zipfile.ZipFile(tmp_path / "deep.pt", "w") as archive:  # a list in a list in a list, 100,000 times
        archive.writestr("deep/data.pkl", b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
        archive.writestr("deep/version", "3\n")
    assert refusal(tmp_path / "deep.pt").code == "checkpoint.no-weights"
