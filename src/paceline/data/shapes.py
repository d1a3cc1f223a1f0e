"""`shapes`: synthetic images of circles, squares, triangles and crosses. Image i is a function of (seed, i)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.datasets import register_data
from paceline.runtime.rng import derive_seed

CLASSES = ("circle", "square", "triangle", "cross")
Mask = NDArray[np.bool_]
Grid = NDArray[np.float64]


class Shapes(Dataset[dict[str, Tensor]]):
    """`length` images of `channels` × `size` × `size` in [0, 1]; labels are indices into CLASSES."""

    draws_randomness = False

    def __init__(self, length: int, size: int, channels: int, seed: int, labels: bool = True) -> None:
        self._length, self._size, self._channels = length, size, channels
        self._seed, self._labels = seed, labels

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng(derive_seed(self._seed, index))
        label = index % len(CLASSES)
        image = self._draw(CLASSES[label], random)
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
    size: int = 32,
    channels: int = 3,
    length: int = 4096,
    val_length: int = 512,
    labels: bool = True,
    seed: int = 0,
) -> tuple[Shapes, Shapes]:
    return (
        Shapes(length, size, channels, derive_seed(seed, 0), labels),
        Shapes(val_length, size, channels, derive_seed(seed, 1), labels),
    )
