"""Named datasets, selected by the `data:` section of a recipe, and those that paceline brings. Nothing is downloaded.

    train, val = paceline.get_data("shapes", size=16)

A named dataset is a function that returns (training set, evaluation set or None), or a dataset class, without an
evaluation set. Its parameters are its options.

    shapes         synthetic images of circles, squares, triangles and crosses; image i is a function of (seed, i)
    stdlib-text    the source code of the Python standard library, as bytes: available on every machine
    cifar10        the published binary version ("suitable for C programs"), from the folder `cifar-10-batches-bin` of
                   its archive: five training files and a test file of 10,000 records, each of one label byte and 3 × 32
                   × 32 pixel bytes
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from paceline.errors import DataError
from paceline.registry import Builder, Registry
from paceline.runtime.rng import derive_seed

Pair = tuple[Any, Any]
CLASSES = ("circle", "square", "triangle", "cross")
Mask = NDArray[np.bool_]
Grid = NDArray[np.float64]
DATASETS: Registry[None, Pair] = Registry("dataset", error=DataError, hint="@paceline.register_data")
find_data = DATASETS.find
Bytes = NDArray[np.uint8]
FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
RECORD = 1 + 3 * 32 * 32
# Of CIFAR-10: channel means and standard deviations of the training set.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


def register_data(name: str) -> Callable[[Builder], Builder]:
    """Decorator that registers a dataset, for `data.name` in a recipe and `get_data`.

    Args:
        name: of the dataset. The parameters of the function or class are its options in a recipe

    Returns:
        The decorator, for a function that returns (training set, evaluation set or None), or a dataset class.

    Raises:
        DataError: `data.bad-registration`: the name is not a string, or what is decorated can't be called

    Example:
        >>> import torch
        >>> import paceline
        >>> @paceline.register_data("ones")
        ... def ones(length=8):
        ...     return torch.utils.data.TensorDataset(torch.ones(length, 2)), None
        >>> train, val = paceline.get_data("ones", length=4)
        >>> len(train)
        4
    """
    return DATASETS.implement(name)


def get_data(name: str, **options: Any) -> Pair:
    """Return the training and evaluation sets of a named dataset.

    Args:
        name: of a dataset: shapes, stdlib-text, cifar10, or one of `register_data`
        options: of the dataset, as in the `data:` section of a recipe

    Returns:
        (training set, evaluation set or None).

    Raises:
        DataError: `data.unknown-name`, `data.unknown-option`, `data.missing-option`, `data.not-a-pair`

    Example:
        >>> import paceline
        >>> train, val = paceline.get_data("shapes", size=16, length=64)
        >>> len(train)
        64
    """
    made: Any = find_data(name, options)(**options)
    if isinstance(made, list) and made and all(isinstance(each, (Dataset, DataLoader)) for each in made):
        made = tuple(made)  # of random_split; other lists contain batches
    if isinstance(made, tuple) and len(made) == 2 and made[0] is not None:
        return made
    is_data = hasattr(made, "__iter__") or hasattr(made, "__getitem__")
    if is_data and not isinstance(made, (tuple, Mapping, str)):
        return made, None
    got = f"a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, (tuple, Mapping)) else "")
    raise DataError("not-a-pair", f"The dataset {name!r} returned {got} ({DATASETS.place(name)}).")


class Shapes(Dataset[dict[str, Tensor]]):
    """`length` images of `channels` × `size` × `size` in [0, 1]; labels are indices into CLASSES."""

    draws_randomness = False

    def __init__(self, length: int, size: int, channels: int, seed: int, labels: bool = True) -> None:
        self._length, self._size, self._channels = length, size, channels
        self._seed, self._labels = seed, labels

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = np.random.default_rng(derive_seed(self._seed, index))
        label = index % len(CLASSES)
        image = self._draw(CLASSES[label], generator)
        sample = {"inputs": torch.from_numpy(image)}
        if self._labels:
            sample["targets"] = torch.tensor(label)
        return sample

    def _draw(self, shape: str, random: np.random.Generator) -> NDArray[np.float32]:
        radius = random.uniform(0.2, 0.35)
        center_x, center_y = random.uniform(radius, 1 - radius, size=2)
        axis = (np.arange(self._size) + 0.5) / self._size
        inside = _inside(shape, axis[None, :] - center_x, axis[:, None] - center_y, radius)
        back, front = random.uniform(0.0, 0.4, self._channels), random.uniform(0.6, 1.0, self._channels)
        image = np.where(inside, front[:, None, None], back[:, None, None])
        image = image + random.normal(0.0, 0.03, image.shape)
        return np.clip(image, 0.0, 1.0).astype(np.float32)


def _inside(shape: str, x: Grid, y: Grid, radius: float) -> Mask:
    if shape == "circle":
        mask = x**2 + y**2 <= radius**2
    elif shape == "square":
        mask = (abs(x) <= radius * 0.85) & (abs(y) <= radius * 0.85)
    elif shape == "triangle":
        mask = (y <= radius) & (y >= 2 * abs(x) - radius)
    else:
        thick = radius * 0.3
        mask = ((abs(x) <= thick) & (abs(y) <= radius)) | ((abs(y) <= thick) & (abs(x) <= radius))
    return np.asarray(mask)


@register_data("shapes")
def shapes(
    size: int = 32, channels: int = 3, length: int = 4096, val_length: int = 512, labels: bool = True, seed: int = 0
) -> tuple[Shapes, Shapes]:
    return (
        Shapes(length, size, channels, derive_seed(seed, 0), labels),
        Shapes(val_length, size, channels, derive_seed(seed, 1), labels),
    )


class TextWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a text: `context` tokens, with the following tokens as targets."""

    draws_randomness = False

    def __init__(self, text: Bytes, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.context
        window = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return {"inputs": window[:-1], "targets": window[1:]}


class TextEvaluation(TextWindows):
    """The held-out end of the text, with the loss of a bigram model as a baseline."""

    def __init__(self, text: Bytes, context: int, training_text: Bytes) -> None:
        super().__init__(text, context)
        self._training_text = training_text

    def prompt(self) -> Tensor:
        """A typical beginning of such text."""
        return torch.tensor(list(b"\n    def "))

    def decode(self, tokens: Tensor) -> str:
        """Decode byte tokens; tokens beyond 255, from a larger vocabulary, become `?`."""
        return bytes(token if token < 256 else ord("?") for token in tokens.tolist()).decode("utf-8", errors="replace")

    def baselines(self) -> dict[str, float]:
        return {"bigram": bigram_loss(self._training_text, self.text)}


def bigram_loss(training: Bytes, evaluation: Bytes) -> float:
    """Loss in nats per byte, on `evaluation`, of a smoothed bigram model of `training`."""
    counts = np.full((256, 256), 0.01)
    np.add.at(counts, (training[:-1], training[1:]), 1.0)
    log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_probabilities[evaluation[:-1], evaluation[1:]].mean())


def read_stdlib(size: int) -> Bytes:
    """The first `size` bytes of the modules of the standard library, sorted by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    found = 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        parts.append(path.read_bytes())
        found += len(parts[-1])
        if found >= size:
            break
    if not found:
        raise DataError("no-text", f"The source code of the standard library was not found at {folder}.")
    return np.frombuffer(b"".join(parts)[:size], dtype=np.uint8)


@register_data("stdlib-text")
def stdlib_text(
    context: int = 128, size: int = 4_000_000, val_fraction: float = 0.05
) -> tuple[TextWindows, TextWindows]:
    text = read_stdlib(size)
    held_out = max(context + 1, int(len(text) * val_fraction))
    training, evaluation = text[:-held_out], text[-held_out:]
    return TextWindows(training, context), TextEvaluation(evaluation, context, training)


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
                "damaged-file", f"Invalid length of {path}: {len(data)} bytes is not a multiple of {RECORD}."
            )
        parts.append(data.reshape(-1, RECORD))
    return np.concatenate(parts)


@register_data("cifar10")
def cifar10(folder: str = "data", augment: bool = True) -> tuple[Cifar10, Cifar10]:
    root = Path(folder)
    if (root / FOLDER).is_dir():
        root = root / FOLDER
    return Cifar10(read_records(root, TRAIN_FILES), augment), Cifar10(read_records(root, TEST_FILES), False)
