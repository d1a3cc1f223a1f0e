"""What rank 0 returns to the caller of `launch`: plain values and tensors, through files and without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError

_TENSOR, _OBJECT, _TUPLE = "__tensor__", "__object__", "__tuple__"
# Types of ours that know how to become JSON, by name: a result may not choose what gets imported.
_KNOWN = {"History": "paceline.train.history"}


def write(value: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    (folder / "result.json").write_text(json.dumps(_encode(value, tensors, "result")))
    if tensors:
        save_file(tensors, folder / "result.safetensors")


def read(folder: Path) -> Any:
    from safetensors.torch import load_file

    path = folder / "result.safetensors"
    tensors = load_file(path) if path.exists() else {}
    return _decode(json.loads((folder / "result.json").read_text()), tensors)


def _encode(value: Any, tensors: dict[str, Any], place: str) -> Any:
    import torch

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(inner, tensors, f"{place}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_encode(inner, tensors, f"{place}[{index}]") for index, inner in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if type(value).__name__ in _KNOWN and hasattr(value, "to_json"):
        return {_OBJECT: type(value).__name__, "value": value.to_json()}
    raise LaunchError(
        "bad-result",
        f"Rank 0's {place} is of type {type(value).__name__}, which can't be brought back.",
        why="results travel as JSON and tensors, so that reading one can't run code",
        fix="return numbers, strings, lists, dicts, tensors or a History",
    )


def _decode(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_decode(inner, tensors) for inner in value[_TUPLE])
    if _OBJECT in value:
        kind = value[_OBJECT]
        from_json: Callable[[Any], Any] = getattr(import_module(_KNOWN[kind]), kind).from_json
        return from_json(value["value"])
    return {key: _decode(inner, tensors) for key, inner in value.items()}
