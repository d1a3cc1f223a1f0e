"""Images, texts and histograms: their records in `media.jsonl`, and images as PNG files beside it.

    record(folder, "image", "samples", images, step=100)   # writes the file

Whatever is logged is bounded: images have at most 2,048 pixels on a side, a grid 64 images, a text 20,000 characters.
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import TrainError
from paceline.run import regular_files
from paceline.run.folder import RunFolder, not_usable
from paceline.run.history import Record

_MAX_SIDE, _MAX_IMAGES, _GAP = 2048, 64, 2
_MAX_TEXT = 20_000  # as JSON, less than a line of `jsonl` may have
_MAX_VALUES, _BINS = 1_000_000, 64
_COLORS = {1: 0, 3: 2, 4: 6}  # of PNG, by channels


def record(folder: RunFolder, kind: str, name: str, value: Any, step: int) -> Record:
    """The record of a value. The same name and step again replace an earlier image."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 80:
        raise _unfit(kind, f"the name {name!r}", "1 to 80 printable characters")
    about = {"kind": kind, "name": name, "step": step, "time": round(time.time(), 3)}
    if kind == "text":
        if not isinstance(value, str):
            raise _unfit(kind, f"a value of type {type(value).__name__}", "a string")
        return {**about, "text": value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"}
    if kind == "histogram":
        return {**about, **_histogram(value)}
    pixels, clipped = _pixels(value)
    path = folder.image(name, step)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        regular_files.replace(path, _png(pixels))
    except OSError as error:
        raise not_usable(folder.path, error.strerror or str(error)) from error
    height, width = pixels.shape[:2]
    file = f"{path.parent.name}/{path.name}"
    return {**about, "file": file, "width": width, "height": height, **({"clipped": True} if clipped else {})}


def _unfit(kind: str, found: str, expected: str) -> TrainError:
    return TrainError("not-loggable", f"trainer.log_{kind}: {found}.", fix=f"expected {expected}")


def _histogram(values: Any) -> Record:
    """Counts in intervals of equal width. Of many values, every n-th one is counted."""
    try:
        flat = torch.as_tensor(values).detach().reshape(-1)
        if flat.is_complex():
            raise TypeError("complex numbers")
        numbers = flat[:: 1 + flat.numel() // _MAX_VALUES].to("cpu", torch.float64).numpy()
        known = numbers[np.isfinite(numbers)]
        counts, edges = np.histogram(known, _BINS)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unfit("histogram", str(error), "a tensor, an array or a list of numbers") from error
    mean, std = (float(known.mean()), float(known.std())) if known.size else (math.nan, math.nan)
    about = {"low": float(edges[0]), "width": float(edges[1] - edges[0]), "counts": counts.tolist()}
    return {**about, "mean": mean, "std": std, "nonfinite": int(numbers.size - known.size)}


def _pixels(image: Any) -> tuple[np.ndarray, bool]:
    """An image as height × width × channels bytes; of a batch, a grid. And whether values were clipped."""
    if isinstance(image, Tensor):
        array = (image.detach().float() if image.is_floating_point() else image.detach()).cpu().numpy()
    else:
        array = np.asarray(image.convert("RGBA") if hasattr(image, "getbands") else image)
    images = array[None, :, :, None] if array.ndim == 2 else array[None] if array.ndim == 3 else array
    if images.ndim != 4 or not images.size or array.dtype.kind not in "biuf":
        raise _unfit_image(array)
    is_first, is_last = images.shape[1] in _COLORS, images.shape[3] in _COLORS
    if array.ndim > 2 and is_first and (isinstance(image, Tensor) or not is_last):
        images = images.transpose(0, 2, 3, 1)
    elif not is_last:
        raise _unfit_image(array)
    columns = math.ceil(math.sqrt(min(len(images), _MAX_IMAGES)))
    every = math.ceil(max(images.shape[1:3]) * columns / _MAX_SIDE)
    images = images[:_MAX_IMAGES, ::every, ::every]
    if images.dtype.kind in "bf":
        images = np.nan_to_num(images.astype(np.float32), posinf=1, neginf=0) * 255
    clipped = bool(images.min() < -2 or images.max() > 257)
    return _grid((images.clip(0, 255) + (0.5 if images.dtype.kind == "f" else 0)).astype(np.uint8), columns), clipped


def _unfit_image(array: np.ndarray) -> TrainError:
    found = f"a {array.dtype} array of shape {array.shape}"
    return _unfit("image", found, "C×H×W, H×W×C (1, 3 or 4 channels), H×W, or a batch: N×C×H×W, N×H×W×C")


def _grid(images: np.ndarray, columns: int) -> np.ndarray:
    count, height, width, channels = images.shape
    rows, tall, wide = math.ceil(count / columns), height + _GAP, width + _GAP
    grid = np.zeros((rows * tall - _GAP, columns * wide - _GAP, channels), np.uint8)
    for number, image in enumerate(images):
        top, left = number // columns * tall, number % columns * wide
        grid[top : top + height, left : left + width] = image
    return grid


def _png(pixels: np.ndarray) -> bytes:
    height, width, channels = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with its filter: none
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0),
        b"IDAT": zlib.compress(lines.tobytes(), 6),
        b"IEND": b"",
    }
    chunks = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
              for kind, data in parts.items())  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
