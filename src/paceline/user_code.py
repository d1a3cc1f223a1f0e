"""Functions and classes that a recipe names as `module:name`, imported from the user's code.

    model: {name: "my_module:build", width: 64}     my_module.py beside the recipe, or an installed package
    data: {name: "path/to/file.py:make"}            a file

A module is looked for in the folder of the recipe (its key `code`), in the working directory, and where Python looks;
the path of a file is relative to the first or the second of these. Only what builds the model, the data or the metrics
of a recipe may call `load`: reading a recipe never executes code.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError, PacelineError, did_you_mean

_SOURCE = ".py"


def is_own(name: str) -> bool:
    """Whether a name in a recipe is the user's, rather than one in a registry."""
    return ":" in name


def load(name: str, folder: str | None = None) -> Any:
    """The function or class of that name. `folder` is the recipe's."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ConfigError("no-module", f"Invalid name {name!r}: expected module:name.")
    places = list(dict.fromkeys(Path(place).absolute() for place in (folder or ".", ".")))
    found: Any = _import(source, places)
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [each for each in dir(found) if not each.startswith("_")]
            file = getattr(found, "__file__", None)
            where = f"{source} ({file})" if file else source
            raise ConfigError("no-such-name", f"{where} has no {part!r}.", fix=did_you_mean(part, names))
        found = getattr(found, part)
    _require_callable(name, found)
    return found


def _require_callable(name: str, found: Any) -> None:
    """An nn.Module can be called, too, but that computes its outputs."""
    if isinstance(found, type) or (callable(found) and not hasattr(found, "forward")):
        return
    attribute = name.rpartition(":")[2]
    raise ConfigError(
        "not-callable",
        f"{name} is an object of type {type(found).__name__}, not a function or class.",
        fix=f"write a function that returns it: def make(): return {attribute}",
    )


def _import(source: str, places: list[Path]) -> ModuleType:
    is_path = source.endswith(_SOURCE)
    paths = [place / (source if is_path else f"{source}{_SOURCE}") for place in places]
    file = next((path for path in paths if path.is_file()), None) if is_path or "." not in source else None
    if file is None and (is_path or "/" in source):
        beside = [file.name for path in paths for file in path.parent.glob(f"*{_SOURCE}")]
        found = [str(Path(source).with_name(name)) for name in beside]  # written as `source` is
        raise _not_found(source, places, "no such file in {}", found)
    name = None if file is None else _module_name(file)
    for place in reversed([*([file.parent] if file else []), *places]):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    try:
        return import_module(source) if file is None or name is None else _import_file(name, file)
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if file is None and missing and f"{source}.".startswith(f"{missing}."):
            modules = [path.stem for place in places for path in place.glob(f"*{_SOURCE}")]
            modules += [path.parent.name for place in places for path in place.glob(f"*/__init__{_SOURCE}")]
            raise _not_found(source, places, "no such module in {}, nor installed", modules) from None
        raise ConfigError(
            "import-failed", f"Importing {source} raised {type(error).__name__}: {error}{_place(error)}."
        ) from error


def _module_name(file: Path) -> str:
    """The name under which a file is imported: its own, unless another module has that, such as one of Python's."""
    name = file.stem.replace(".", "_")
    taken = sys.modules.get(name)
    origin = None if taken is None else getattr(taken, "__file__", None)
    if name not in sys.stdlib_module_names and (taken is None or (origin and Path(origin).resolve() == file.resolve())):
        return name
    return f"{name}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"


def _import_file(name: str, file: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place(error: BaseException) -> str:
    """` (file.py:3)`: the line of the innermost frame that is not Python's own."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    # Of the user's code: neither ours, nor Python's, nor that of a package, such as one that replaces sys.exit.
    installed = {"importlib", "site-packages"}
    own = [
        frame
        for frame in frames
        if frame.filename != __file__ and not installed.intersection(Path(frame.filename).parts)
    ]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _not_found(source: str, places: list[Path], what: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    fix = f"{did_you_mean(source, names)} " if names else ""
    searched = what.format(" or ".join(map(str, places)))
    return ConfigError(
        "no-module",
        f"{source!r} not found: {searched}.",
        fix=f"{fix}If it is in another folder, set `code` to that folder.",
    )
