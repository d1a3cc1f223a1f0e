"""`cifar10`: the published binary version, read from a folder.

Nothing is downloaded. The archive is "CIFAR-10 binary version (suitable for C programs)" of the dataset's home page;
unpacked, it is a folder `cifar-10-batches-bin` with five training files and one test file of 10,000 records, each of
one label byte and 3 × 32 × 32 pixel bytes.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from paceline.data.datasets import register_data
from paceline.errors import DataError

FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
RECORD = 1 + 3 * 32 * 32
# Channel means and standard deviations of the training set.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class Cifar10(Dataset[dict[str, Tensor]]):
    """Normalized images and labels; with `augment`, random crops of the padded image and flips."""

    def __init__(self, records: NDArray[np.uint8], augment: bool) -> None:
        self._records, self._augment = records, augment
        self.draws_randomness = augment

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        record = self._records[index]
        image = torch.from_numpy(record[1:].reshape(3, 32, 32).astype(np.float32)) / 255.0
        image = (image - MEAN) / DEVIATION
        if self._augment:
            image = crop_and_flip(image)
        return {"inputs": image, "targets": torch.tensor(int(record[0]))}


def crop_and_flip(image: Tensor, padding: int = 4) -> Tensor:
    """The usual augmentation, using Python's generator, which the loader seeds per sample."""
    top, left = random.randint(0, 2 * padding), random.randint(0, 2 * padding)
    height, width = image.shape[1:]
    padded = functional.pad(image, (padding,) * 4)
    crop = padded[:, top : top + height, left : left + width]
    return crop.flip(2) if random.random() < 0.5 else crop


def read_records(folder: Path, names: tuple[str, ...]) -> NDArray[np.uint8]:
    parts = []
    for name in names:
        path = folder / name
        try:
            data = np.fromfile(path, dtype=np.uint8)
        except OSError:
            raise DataError(
                "missing-files",
                f"CIFAR-10 file {name} not found in {folder}.",
                fix="download and unpack the binary version (cifar-10-binary.tar.gz), and set data.folder to the "
                f"folder that contains {FOLDER}",
            ) from None
        if len(data) == 0 or len(data) % RECORD:
            raise DataError(
                "damaged-file",
                f"Invalid length of {path}: {len(data)} bytes is not a multiple of {RECORD}.",
                why="each record consists of one label byte and 3072 pixel bytes",
                fix="download the archive again",
            )
        parts.append(data.reshape(-1, RECORD))
    return np.concatenate(parts)


@register_data("cifar10")
def cifar10(folder: str = "data", augment: bool = True) -> tuple[Cifar10, Cifar10]:
    root = Path(folder)
    if (root / FOLDER).is_dir():
        root = root / FOLDER
    return Cifar10(read_records(root, TRAIN_FILES), augment), Cifar10(read_records(root, TEST_FILES), False)
