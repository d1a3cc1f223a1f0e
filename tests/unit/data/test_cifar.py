from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import paceline
from paceline.data.cifar import RECORD, TEST_FILES, TRAIN_FILES
from paceline.errors import DataError


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
        return batches.__getitems__((epoch, [3]))["inputs"][0]

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
