"""What rank 0 returns to the caller of `launch`: plain values and tensors, through files and without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError

# Types of ours that know how to become JSON, by name: a result may not choose what gets imported.
_KNOWN = {"History": "paceline.train.history"}


def write(value: Any, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    text = json.dumps(_encode(value, tensors, "result"))
    if tensors:
        try:
            save_file(tensors, folder / "result.safetensors")
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise _refusal(f"a tensor of the result can't be stored: {error}") from None
    (folder / "result.json").write_text(text)


def read(folder: Path) -> Any:
    from safetensors.torch import load_file

    if not (folder / "result.json").exists():
        return None  # rank 0 left by sys.exit(0)
    path = folder / "result.safetensors"
    tensors = load_file(path) if path.exists() else {}
    return _decode(json.loads((folder / "result.json").read_text()), tensors)


def _encode(value: Any, tensors: dict[str, Any], place: str) -> list[Any]:
    """[kind, content]: every value says what it is, so that no dict of the user's can be mistaken for something."""
    import numpy
    import torch

    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return ["tensor", name]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise _refusal(f"rank 0's {place} is a dict whose keys are not all strings")
        return ["dict", {key: _encode(inner, tensors, f"{place}[{key!r}]") for key, inner in value.items()}]
    if isinstance(value, (list, tuple)):
        items = [_encode(inner, tensors, f"{place}[{index}]") for index, inner in enumerate(value)]
        return ["tuple" if isinstance(value, tuple) else "list", items]
    if type(value).__name__ in _KNOWN and hasattr(value, "to_json"):
        return ["object", [type(value).__name__, value.to_json()]]
    raise _refusal(f"rank 0's {place} is of type {type(value).__name__}")


def _refusal(what: str) -> LaunchError:
    return LaunchError(
        "bad-result",
        f"The result can't be brought back: {what}.",
        why="results travel as JSON and tensors, so that reading one can't run code",
        fix="return numbers, strings, lists, dicts with string keys, tensors or a History",
    )


def _decode(encoded: list[Any], tensors: dict[str, Any]) -> Any:
    kind, content = encoded
    if kind == "value":
        return content
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(inner, tensors) for key, inner in content.items()}
    if kind == "object":
        name, value = content
        from_json: Callable[[Any], Any] = getattr(import_module(_KNOWN[name]), name).from_json
        return from_json(value)
    items = [_decode(inner, tensors) for inner in content]
    return tuple(items) if kind == "tuple" else items
