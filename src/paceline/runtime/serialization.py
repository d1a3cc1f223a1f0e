"""Plain values as JSON and back, with the tensors inside them taken out.

    tensors: dict[str, Tensor] = {}
    text = json.dumps(to_json({"seen": Counter({3: 1}), "mean": tensor}, "callbacks/0", tensors))

What JSON has no word for is written as an object with one key: `{"$pairs": [[3, 1]]}` for a dict whose keys are not
all strings, `{"$float": "nan"}`, `{"$tensor": "callbacks/0/mean"}`. Tuples come back as lists, but as keys of dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, count
from math import isfinite
from typing import Any

import numpy
from torch import Tensor

from paceline.errors import CheckpointError

_WORDS = ("$pairs", "$float", "$tensor")
_DEEPEST = 64  # levels of lists and dicts: readers of JSON have limits of their own


def to_json(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """`path` names the value in errors, and the tensors that are put into `tensors`."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        others = (f"{path}#{number}" for number in count(2))  # {"a": {"b": …}, "a/b": …} would give one name twice
        name = next(name for name in chain([path], others) if name not in tensors)
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, Mapping) and depth < _DEEPEST:
        if all(isinstance(key, str) for key in value) and not any(word in value for word in _WORDS):
            return {key: to_json(inner, f"{path}/{key}", tensors, depth + 1) for key, inner in value.items()}
        keys = [to_json(key, path, tensors, depth + 1) for key in value]
        items = [to_json(inner, f"{path}/{n}", tensors, depth + 1) for n, inner in enumerate(value.values())]
        return {"$pairs": [list(pair) for pair in zip(keys, items, strict=True)]}
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return [to_json(inner, f"{path}/{number}", tensors, depth + 1) for number, inner in enumerate(value)]
    kind = (
        type(value).__qualname__
        if type(value).__module__ == "builtins"
        else f"{type(value).__module__}.{type(value).__qualname__}"
    )
    deep = " more than 64 levels deep" if isinstance(value, (Mapping, list, tuple)) else ""
    raise CheckpointError(
        "not-plain",
        f"{path[:200]} is of {kind}{deep}, which a checkpoint can't hold.",
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
            return {_as_key(_from_json(key, tensor)): _from_json(item, tensor) for key, item in inner}
        return {key: _from_json(inner, tensor) for key, inner in value.items()}
    return [_from_json(inner, tensor) for inner in value] if isinstance(value, list) else value


def _as_key(value: Any) -> Any:
    return tuple(_as_key(inner) for inner in value) if isinstance(value, list) else value
