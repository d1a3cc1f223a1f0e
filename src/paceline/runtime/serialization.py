"""Plain values as JSON and back, with the tensors inside them taken out: reading one never runs code.

    tensors: dict[str, Tensor] = {}
    text = json.dumps(to_json({"seen": Counter({3: 1}), "mean": tensor}, "callbacks/0", tensors))

What JSON has no word for is written as an object with one key: `{"$pairs": [[3, 1]]}` for a dict whose keys are not
all strings, `{"$float": "nan"}`, `{"$tensor": "callbacks/0/mean"}`. In a checkpoint tuples come back as lists, but as
keys of dicts. A result of a function (`save_result`) keeps them, `{"$tuple": [1, 2]}`, and may hold objects that know
how to become JSON: `{"$object": ["History", {…}]}`.
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

_WORDS = ("$pairs", "$float", "$tensor")
_DEEPEST = 64  # levels of lists and dicts: readers of JSON have limits of their own

Place = tuple[str | int, ...]  # keys and indices from the outermost value to an inner one


class _Kind(NamedTuple):
    """What differs between a checkpoint's values and a result."""

    refuse: Callable[[Place, str], PacelineError]
    exact: bool = False  # tuples stay tuples, and keys have to be strings
    objects: Mapping[str, str] = {}  # classes with to_json and from_json, by name: the module of each

    @property
    def words(self) -> tuple[str, ...]:
        return (*_WORDS, "$tuple", "$object") if self.exact else _WORDS


def to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`path` names the value in errors, and the tensors that are put into `tensors`."""
    return _encode(value, (path,), tensors, _Kind(_not_plain))


def from_json(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """`tensor` gives a tensor by its name."""
    try:
        return _decode(value, tensor, _Kind(_not_plain))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "damaged",
            f"A plain value of the checkpoint is none: {type(error).__name__}: {error}.",
            why="it is not what was written: a program has changed it",
            fix="take an older one",
        ) from None


def save_result(value: Any, folder: Path, objects: Mapping[str, str] | None = None) -> None:
    """Write what a function returned, for another process."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(value, ("result",), tensors, _Kind(_bad_result, True, objects or {})))
    if tensors:
        try:
            save_file({name: each.cpu().contiguous().clone() for name, each in tensors.items()}, _tensors_in(folder))
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise _refused(f"a tensor of the result can't be stored: {error}") from None
    _values_in(folder).write_text(text)


def load_result(folder: Path, objects: Mapping[str, str] | None = None) -> Any:
    """What `save_result` wrote; None where it wrote nothing."""
    if not _values_in(folder).exists():
        return None
    tensors = load_file(_tensors_in(folder)) if _tensors_in(folder).exists() else {}
    values = json.loads(_values_in(folder).read_text())
    return _decode(values, tensors.__getitem__, _Kind(_bad_result, True, objects or {}))


def _values_in(folder: Path) -> Path:
    return folder / "result.json"


def _tensors_in(folder: Path) -> Path:
    return folder / "result.safetensors"


def _encode(value: Any, place: Place, tensors: dict[str, Tensor], kind: _Kind) -> Any:
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        path = "/".join(map(str, place))
        others = (f"{path}#{number}" for number in count(2))  # {"a": {"b": …}, "a/b": …} would give one name twice
        name = next(name for name in chain([path], others) if name not in tensors)
        tensors[name] = value.detach()
        return {"$tensor": name}
    if len(place) <= _DEEPEST and isinstance(value, (Mapping, list, tuple)):
        return _encode_container(value, place, tensors, kind)
    if type(value).__name__ in kind.objects and hasattr(value, "to_json"):
        return {"$object": [type(value).__name__, _encode(value.to_json(), place, tensors, kind)]}
    deep = f" more than {_DEEPEST} levels deep" if isinstance(value, (Mapping, list, tuple)) else ""
    raise kind.refuse(place, f"{_type_name(value)}{deep}")


def _encode_container(value: Any, place: Place, tensors: dict[str, Tensor], kind: _Kind) -> Any:
    def encode(inner: Any, key: str | int) -> Any:
        return _encode(inner, (*place, key), tensors, kind)

    if not isinstance(value, Mapping):
        items = [encode(inner, number) for number, inner in enumerate(value)]
        return {"$tuple": items} if kind.exact and isinstance(value, tuple) else items
    is_named = all(isinstance(key, str) for key in value)
    if is_named and not any(word in value for word in kind.words):
        return {key: encode(inner, key) for key, inner in value.items()}
    if kind.exact and not is_named:
        raise kind.refuse(place, "")
    keys = [_encode(key, place, tensors, kind) for key in value]
    return {
        "$pairs": [[key, encode(inner, n)] for n, (key, inner) in enumerate(zip(keys, value.values(), strict=True))]
    }


def _decode(value: Any, tensor: Callable[[str], Tensor], kind: _Kind) -> Any:
    def decode(inner: Any) -> Any:
        return _decode(inner, tensor, kind)

    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    word = next(iter(value), None)
    if len(value) != 1 or word not in kind.words:
        return {key: decode(inner) for key, inner in value.items()}
    inner = value[word]
    if word == "$float":
        return float(inner)
    if word == "$tensor":
        return tensor(inner)
    if word == "$tuple":
        return tuple(decode(inner))
    if word == "$object":  # by name: a result may not choose what is imported
        name, content = inner
        return getattr(import_module(kind.objects[name]), name).from_json(decode(content))
    return {_as_key(decode(key)): decode(item) for key, item in inner}


def _as_key(value: Any) -> Any:
    return tuple(_as_key(inner) for inner in value) if isinstance(value, list) else value


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _not_plain(place: Place, kind: str) -> PacelineError:
    return CheckpointError(
        "not-plain",
        f"{'/'.join(map(str, place))[:200]} is of {kind}, which a checkpoint can't hold.",
        why="a checkpoint holds tensors and plain values only, so that loading one never runs code",
        fix="give numbers, strings, tensors, and lists and dicts of those",
    )


def _bad_result(place: Place, kind: str) -> PacelineError:
    named = f"rank 0's {place[0]}" + "".join(f"[{key!r}]" for key in place[1:])
    return _refused(f"{named} is of type {kind}" if kind else f"{named} is a dict whose keys are not all strings")


def _refused(what: str) -> PacelineError:
    return LaunchError(
        "bad-result",
        f"The result can't be brought back: {what}.",
        why="results travel as JSON and tensors, so that reading one can't run code",
        fix="return numbers, strings, lists, dicts with string keys, tensors or a History",
    )
