"""Writes small checkpoints without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.local_store import locate
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.writer import Description, Writer


def save(folder: Path, model: nn.Module, **description: Any) -> Path:
    """The model's weights, each once, and one tensor of an optimizer."""
    names: dict[int, str] = {}
    aliases = {}
    tensors = {"optimizer/step": torch.tensor(3.0)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), f"model/{name}")
        if first == f"model/{name}":
            tensors[first] = tensor.detach()
        else:
            aliases[f"model/{name}"] = first
    return write(folder, tensors, aliases=aliases, **description)


def write(folder: Path, tensors: Mapping[str, Tensor], **description: Any) -> Path:
    described = Description(**{"step": 12, "epoch": 1, "optimizer": True, "layout": {"ranks": 1}, **description})
    writer = Writer()
    writer.begin(locate(folder), {name: LocalShard(tensor) for name, tensor in tensors.items()}, described).result()
    writer.close()
    return folder


def flip_a_bit(folder: Path) -> None:
    """Of the last tensor's last byte."""
    path = folder / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
