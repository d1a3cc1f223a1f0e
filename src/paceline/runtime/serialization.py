"""Values as JSON plus named tensors. Reading them never runs code.

    tensors: dict[str, Tensor] = {}
    text = json.dumps(to_json({"seen": Counter({3: 1}), "mean": tensor}, "callbacks/0", tensors))

What JSON can't represent becomes an object with one tag: `{"$pairs": [[3, 1]]}` for a dict with keys other than
strings, `{"$float": "nan"}`, `{"$tensor": "callbacks/0/mean"}`. In a checkpoint tuples become lists, except as keys of
dicts. The result of a function (`save_result`) keeps them, `{"$tuple": [1, 2]}`, and may contain objects of known
classes with to_json and from_json: `{"$object": ["History", {…}]}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import chain, count
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError, LaunchError, PacelineError

_TAGS = ("$pairs", "$float", "$tensor")
_MAX_DEPTH = 64  # of nested lists and dicts: JSON parsers have limits of their own
_VALUES, _TENSORS = "result.json", "result.safetensors"

KeyPath = tuple[str | int, ...]  # keys and indices from the outermost value to an inner one


class _Codec(NamedTuple):
    """The differences between values of a checkpoint and a result."""

    error: Callable[[KeyPath, str], PacelineError]  # for a value that it does not support
    exact: bool = False  # tuples stay tuples, and keys must be strings
    objects: Mapping[str, str] = {}  # supported classes with to_json and from_json, and their modules

    @property
    def tags(self) -> tuple[str, ...]:
        return (*_TAGS, "$tuple", "$object") if self.exact else _TAGS


def to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value and add its tensors to `tensors`. `path` is the prefix of their names, and names it in errors."""
    return _encode(value, (path,), tensors, _Codec(_not_plain))


def from_json(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Decode a value; `tensor` returns a tensor by name."""
    try:
        return _decode(value, tensor, _Codec(_not_plain))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "damaged",
            f"A value in the checkpoint is corrupted: {type(error).__name__}: {error}.",
            why="it was modified after it had been saved",
        ) from None


def save_result(value: Any, folder: Path, objects: Mapping[str, str] | None = None) -> None:
    """Write the return value of a function, for another process."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(value, ("result",), tensors, _Codec(_bad_result, True, objects or {})))
    if tensors:
        try:
            save_file({name: each.cpu().contiguous().clone() for name, each in tensors.items()}, folder / _TENSORS)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise _unsupported(f"a tensor can't be saved: {error}") from None
    (folder / _VALUES).write_text(text)


def load_result(folder: Path, objects: Mapping[str, str] | None = None) -> Any:
    """What `save_result` wrote; None if there is no result."""
    if not (folder / _VALUES).exists():
        return None
    tensors = load_file(folder / _TENSORS) if (folder / _TENSORS).exists() else {}
    values = json.loads((folder / _VALUES).read_text())
    return _decode(values, tensors.__getitem__, _Codec(_bad_result, True, objects or {}))


def _encode(value: Any, path: KeyPath, tensors: dict[str, Tensor], codec: _Codec) -> Any:
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        joined = "/".join(map(str, path))
        others = (f"{joined}#{number}" for number in count(2))  # {"a": {"b": …}, "a/b": …} have the same name
        name = next(name for name in chain([joined], others) if name not in tensors)
        tensors[name] = value.detach()
        return {"$tensor": name}
    if len(path) <= _MAX_DEPTH and isinstance(value, (Mapping, list, tuple)):
        return _encode_container(value, path, tensors, codec)
    if type(value).__name__ in codec.objects and hasattr(value, "to_json"):
        return {"$object": [type(value).__name__, _encode(value.to_json(), path, tensors, codec)]}
    deep = f" nested more than {_MAX_DEPTH} levels deep" if isinstance(value, (Mapping, list, tuple)) else ""
    type_name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise codec.error(path, f"{type_name}{deep}")


def _encode_container(value: Any, path: KeyPath, tensors: dict[str, Tensor], codec: _Codec) -> Any:
    def encode(inner: Any, key: str | int) -> Any:
        return _encode(inner, (*path, key), tensors, codec)

    if not isinstance(value, Mapping):
        items = [encode(inner, number) for number, inner in enumerate(value)]
        return {"$tuple": items} if codec.exact and isinstance(value, tuple) else items
    has_names = all(isinstance(key, str) for key in value)
    if has_names and not any(tag in value for tag in codec.tags):
        return {key: encode(inner, key) for key, inner in value.items()}
    if codec.exact and not has_names:
        raise codec.error(path, "")
    keys = [_encode(key, path, tensors, codec) for key in value]
    values = [encode(inner, number) for number, inner in enumerate(value.values())]
    return {"$pairs": [list(pair) for pair in zip(keys, values, strict=True)]}


def _decode(value: Any, tensor: Callable[[str], Tensor], codec: _Codec) -> Any:
    def decode(inner: Any) -> Any:
        return _decode(inner, tensor, codec)

    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), None)
    if len(value) != 1 or tag not in codec.tags:
        return {key: decode(inner) for key, inner in value.items()}
    inner = value[tag]
    if tag == "$float":
        return float(inner)
    if tag == "$tensor":
        return tensor(inner)
    if tag == "$tuple":
        return tuple(decode(inner))
    if tag == "$object":  # only known classes: a result must not choose what is imported
        name, content = inner
        return getattr(import_module(codec.objects[name]), name).from_json(decode(content))
    return {_as_key(decode(key)): decode(item) for key, item in inner}


def _as_key(value: Any) -> Any:
    return tuple(_as_key(inner) for inner in value) if isinstance(value, list) else value


def _not_plain(path: KeyPath, kind: str) -> PacelineError:
    return CheckpointError(
        "not-plain", f"{'/'.join(map(str, path))[:200]} can't be saved in a checkpoint: unsupported type {kind}."
    )


def _bad_result(path: KeyPath, kind: str) -> PacelineError:
    name = f"rank 0's {path[0]}" + "".join(f"[{key!r}]" for key in path[1:])
    return _unsupported(f"{name} has type {kind}" if kind else f"{name} is a dict with keys other than strings")


def _unsupported(what: str) -> PacelineError:
    return LaunchError("bad-result", f"Unsupported result: {what}.")
