"""A checkpoint on disk: a folder with tensors in safetensors and everything else in JSON. No pickle.

    step-000120/
      state.json             step, epoch, metadata, the optimizer's settings
      model.safetensors      the model's state dict
      ema.safetensors        the averaged weights, where the run has them
      optimizer.safetensors  the optimizer's tensors, named state/<parameter>/<entry>

It is written beside its final place and renamed when whole, so a folder of that name is always complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, in memory."""

    step: int
    epoch: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any] | None = None
    optimizer_kind: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ema: Mapping[str, Tensor] | None = None
    state: Mapping[str, Any] = field(default_factory=dict)  # plain values of scaler, schedule, best results


def write(folder: Path, snapshot: Snapshot) -> None:
    """Save under `folder`, all of it or nothing."""
    if folder.exists():
        raise CheckpointError(
            "exists",
            f"There is already something at {folder}.",
            why="a committed checkpoint is never overwritten",
            fix="save under another name, or remove it first",
        )
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        save_file(_plain(snapshot.model), partial / "model.safetensors")
        state: dict[str, Any] = {
            "format": FORMAT,
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "optimizer_kind": snapshot.optimizer_kind,
            "state": dict(snapshot.state),
            "metadata": dict(snapshot.metadata),
        }
        if snapshot.ema is not None:
            save_file(_plain(snapshot.ema), partial / "ema.safetensors")
        if snapshot.optimizer is not None:
            tensors, state["optimizer"] = _split_optimizer(snapshot.optimizer)
            save_file(_plain(tensors), partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        _commit(partial, folder)
    except (OSError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            "not-saved",
            f"The checkpoint {folder} could not be written: {error}.",
            fix="check free space and rights; metadata has to be plain values",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def free_name(folder: Path) -> Path:
    """The folder itself, or with a number behind it: a run that went back and came to the same step again."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors wants whole tensors that share no memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _commit(partial: Path, folder: Path) -> None:
    for path in [*partial.iterdir(), partial]:
        _sync(path)
    partial.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> Snapshot:
    if not (folder / "state.json").is_file():
        raise CheckpointError(
            "missing",
            f"There is no checkpoint at {folder}.",
            fix="give the folder that holds state.json, e.g. runs/gpt/checkpoints/step-000120",
        )
    try:
        state = json.loads((folder / "state.json").read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(
                "other-format", f"{folder} has the format {state['format']}, this version reads {FORMAT}."
            )
        model = load_file(folder / "model.safetensors")
        optimizer = None
        if "optimizer" in state:
            optimizer = _join_optimizer(load_file(folder / "optimizer.safetensors"), state["optimizer"])
        average = folder / "ema.safetensors"
        return Snapshot(
            step=int(state["step"]),
            epoch=int(state["epoch"]),
            model=model,
            ema=load_file(average) if average.exists() else None,
            state=state["state"],
            optimizer=optimizer,
            optimizer_kind=state["optimizer_kind"],
            metadata=state["metadata"],
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            "damaged", f"The checkpoint {folder} can't be read: {type(error).__name__}: {error}."
        ) from error


def _split_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """torch's optimizer state dict as named tensors and plain values."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        values[str(parameter)] = {}
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"state/{parameter}/{entry}"] = value
            else:
                values[str(parameter)][entry] = value
    groups = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in state["param_groups"]
    ]
    return tensors, {"values": values, "groups": groups}


def _join_optimizer(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(key): dict(entries) for key, entries in values["values"].items()}
    for name, tensor in tensors.items():
        _, parameter, entry = name.split("/")
        state[int(parameter)][entry] = tensor
    return {"state": state, "param_groups": values["groups"]}
