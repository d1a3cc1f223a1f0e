"""Plain values as JSON and back, with the tensors inside them taken out.

    tensors: dict[str, Tensor] = {}
    text = json.dumps(to_json({"seen": Counter({3: 1}), "mean": tensor}, "callbacks/0", tensors))

What JSON has no word for is written as an object with one key: `{"$pairs": [[3, 1]]}` for a dict whose keys are not
all strings, `{"$float": "nan"}`, `{"$tensor": "callbacks/0/mean"}`. Tuples come back as lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import numpy
from torch import Tensor

from paceline.errors import CheckpointError

_WORDS = ("$pairs", "$float", "$tensor")


def to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`path` names the value in errors, and the tensors that are put into `tensors`."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not any(word in value for word in _WORDS):
            return {key: to_json(inner, f"{path}/{key}", tensors) for key, inner in value.items()}
        pairs = enumerate(value.items())
        return {"$pairs": [[to_json(k, path, tensors), to_json(v, f"{path}/{n}", tensors)] for n, (k, v) in pairs]}
    if isinstance(value, (list, tuple)):
        return [to_json(inner, f"{path}/{number}", tensors) for number, inner in enumerate(value)]
    raise CheckpointError(
        "not-plain",
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold.",
        why="a checkpoint holds tensors and plain values only, so that loading one never runs code",
        fix="give numbers, strings, tensors, and lists and dicts of those",
    )


def from_json(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """`tensor` gives a tensor by its name."""
    try:
        return _from_json(value, tensor)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "damaged",
            f"A plain value of the checkpoint is none: {type(error).__name__}: {error}.",
            why="it is not what was written: a program has changed it",
            fix="take an older one",
        ) from None


def _from_json(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and (word := next(iter(value))) in _WORDS:
            inner = value[word]
            if word == "$float":
                return float(inner)
            if word == "$tensor":
                return tensor(inner)
            return {_from_json(key, tensor): _from_json(item, tensor) for key, item in inner}
        return {key: _from_json(inner, tensor) for key, inner in value.items()}
    return [_from_json(inner, tensor) for inner in value] if isinstance(value, list) else value
