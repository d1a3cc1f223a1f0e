"""`stdlib-text`: the source code of the Python standard library, as bytes. It is available on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.datasets import register_data
from paceline.errors import DataError

Bytes = NDArray[np.uint8]


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
        raise DataError(
            "no-text",
            f"The source code of the standard library was not found at {folder}.",
            why="this Python was installed without its .py files",
            fix="use another dataset: data.name=shapes model.name=resnet20",
        )
    return np.frombuffer(b"".join(parts)[:size], dtype=np.uint8)


@register_data("stdlib-text")
def stdlib_text(
    context: int = 128, size: int = 4_000_000, val_fraction: float = 0.05
) -> tuple[TextWindows, TextWindows]:
    text = read_stdlib(size)
    held_out = max(context + 1, int(len(text) * val_fraction))
    training, evaluation = text[:-held_out], text[-held_out:]
    return TextWindows(training, context), TextEvaluation(evaluation, context, training)
