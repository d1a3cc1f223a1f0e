"""Datasets by name: those of users, and those that paceline brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import paceline
from paceline.data.datasets import RECORD, TEST_FILES, TRAIN_FILES, bigram_loss
from paceline.errors import DataError


def test_unknown_datasets_and_options_have_codes() -> None:
    with pytest.raises(DataError) as name:
        paceline.get_data("shape")
    assert name.value.code == "data.unknown-name" and "did you mean 'shapes'" in str(name.value)
    with pytest.raises(DataError) as option:
        paceline.get_data("shapes", sizes=3)
    assert option.value.code == "data.unknown-option" and "did you mean 'size'" in str(option.value)


def test_a_dataset_class_is_trained_on_without_an_evaluation_set() -> None:
    @paceline.register_data("squares")
    class Squares(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self, count: int = 4) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

    train, val = paceline.get_data("squares", count=9)
    assert isinstance(train, Squares) and len(train) == 9 and val is None


@pytest.mark.parametrize("made", [None, (), ([1], [2], [3]), {"train": [1]}, (None, [1]), 7], ids=str)
def test_what_a_dataset_function_may_not_return_is_named_with_its_line(made: Any) -> None:
    @paceline.register_data("odd")
    def odd(path: str) -> Any:
        return made

    with pytest.raises(DataError) as caught:
        paceline.get_data("odd", path="x")
    line = odd.__code__.co_firstlineno
    assert caught.value.code == "data.not-a-pair" and f"test_datasets.py:{line}" in caught.value.what
    with pytest.raises(DataError) as missing:
        paceline.get_data("odd")
    assert missing.value.code == "data.missing-option" and "requires the option 'path'" in missing.value.what
    assert f"test_datasets.py:{line}" in missing.value.what


def test_a_registration_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match="Expected a name") as caught:

        @paceline.register_data  # type: ignore[arg-type]
        def nameless() -> Any: ...

    assert caught.value.code == "data.bad-registration"
    with pytest.raises(DataError, match="got 3"):
        paceline.register_data("three")(3)  # type: ignore[type-var]


def test_shapes_are_a_function_of_their_index() -> None:
    train, val = paceline.get_data("shapes", size=16, channels=1, length=64, val_length=8)
    again, _ = paceline.get_data("shapes", size=16, channels=1, length=64, val_length=8)
    assert torch.equal(train[5]["inputs"], again[5]["inputs"])
    assert not torch.equal(train[5]["inputs"], val[5]["inputs"])
    assert train[5]["inputs"].shape == (1, 16, 16)
    assert train[5]["inputs"].min() >= 0 and train[5]["inputs"].max() <= 1
    assert {int(train[index]["targets"]) for index in range(8)} == {0, 1, 2, 3}


def test_text_windows_hold_each_tokens_successor_and_do_not_overlap() -> None:
    train, _ = paceline.get_data("stdlib-text", context=16, size=5000)
    first, second = train[0], train[1]
    assert torch.equal(first["inputs"][1:], first["targets"][:-1])
    assert second["inputs"][0] == first["targets"][-1]
    assert len(train) > 100


def test_the_held_out_text_is_not_in_the_training_text() -> None:
    train, val = paceline.get_data("stdlib-text", context=16, size=5000)
    assert len(train.text) + len(val.text) == 5000


def test_bigram_loss_is_the_cross_entropy_of_counted_pairs() -> None:
    text = np.frombuffer(b"ab" * 500, dtype=np.uint8)
    assert bigram_loss(text, text) < 0.01
    random = np.random.default_rng(0).integers(0, 4, 200_000, dtype=np.uint8)
    assert bigram_loss(random[:100_000], random[100_000:]) == pytest.approx(np.log(4), abs=0.002)


def write_cifar(folder: Path, records: int = 6) -> np.ndarray:
    """Files in the published binary format; returns the training records."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    parts = []
    for name in (*TRAIN_FILES, *TEST_FILES):
        data = random.integers(0, 256, (records, RECORD), dtype=np.uint8)
        data[:, 0] %= 10
        data.tofile(folder / name)
        parts.append(data)
    return np.concatenate(parts[:-1])


def test_cifar10_reads_the_published_binary_version(tmp_path: Path) -> None:
    records = write_cifar(tmp_path / "cifar-10-batches-bin")
    train, test = paceline.get_data("cifar10", folder=str(tmp_path), augment=False)
    assert (len(train), len(test)) == (30, 6)
    sample = train[7]
    assert int(sample["targets"]) == records[7, 0]
    red = (records[7, 1:1025].reshape(32, 32) / 255 - 0.4914) / 0.2470
    assert np.allclose(sample["inputs"][0].numpy(), red, atol=1e-5)


def test_cifar10_is_cropped_and_flipped_by_the_samples_own_randomness(tmp_path: Path) -> None:
    from paceline.data.seeded_dataset import SeededBatches

    write_cifar(tmp_path / "cifar-10-batches-bin")
    train, test = paceline.get_data("cifar10", folder=str(tmp_path))
    batches = SeededBatches(train, 0, default_collate, own_collate=False)

    def inputs(epoch: int) -> Any:
        return batches.__getitems__((epoch, [3], None))["inputs"][0]

    assert train.draws_randomness and not test.draws_randomness
    assert torch.equal(inputs(0), inputs(0))
    assert not torch.equal(inputs(0), inputs(1))
    assert inputs(0).shape == (3, 32, 32)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_damaged_file_says_what_to_download(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    write_cifar(folder)
    path = folder / "data_batch_3.bin"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        paceline.get_data("cifar10", folder=str(tmp_path))
    assert caught.value.code == ("data.missing-files" if damage == "missing" else "data.damaged-file")
    assert "data_batch_3.bin" in str(caught.value)
