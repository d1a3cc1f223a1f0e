"""Weights saved by another program: a torch file (`.pt`, `.pth`, `.bin`) or a safetensors file.

    external = paceline.load_external_weights(Path("resnet50.pth"))
    model.load_state_dict(external.weights)
    external.metadata                      # {"epoch": 90, ...}: the plain values around the weights

A torch file may contain a state dict, or a dict with one under one of the keys in `WRAPPERS`, tried in order. Prefixes
added by training wrappers are removed from names: `_orig_mod` and similar anywhere, and a leading `module.` if every
name has it. Optimizer state and other values with tensors are ignored.

Pickled code is never executed: files that require it are rejected. Tensors are loaded to the CPU, memory-mapped if the
format allows it.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.text import listed

WRAPPERS = (
    "model_state_dict", "state_dict", "model_state", "model", "module", "net", "network", "weights", "params",
    "ema_state_dict", "model_ema", "params_ema", "ema",
)  # fmt: skip
# Of torch.compile, FSDP and activation checkpointing.
_ANYWHERE = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_FRONT = "module."  # DDP and DataParallel
_MAX_DEPTH = 8  # of nested dicts
_PIECE = 1 << 20


@dataclass(frozen=True)
class ExternalWeights:
    weights: dict[str, Tensor]
    metadata: dict[str, Any]


def load_external_weights(path: Path) -> ExternalWeights:
    """Load the weights and plain values of a file that another program saved, under the names of the unwrapped model.

    Prefixes of DDP, FSDP and torch.compile are removed. Pickled code is never executed: files with any are rejected.

    Args:
        path: of a torch file (.pt, .pth, .bin) or a safetensors file

    Returns:
        An object with `weights`, a state dict on the CPU, and `metadata`, the plain values around them.

    Raises:
        CheckpointError: `checkpoint.missing`, `checkpoint.unreadable`, `checkpoint.needs-code`, `checkpoint.no-weights`

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> import paceline
        >>> torch.save({"state_dict": torch.nn.Linear(2, 2).state_dict(), "epoch": 3}, "model.pth")
        >>> external = paceline.load_external_weights(Path("model.pth"))
        >>> sorted(external.weights), external.metadata
        (['bias', 'weight'], {'epoch': 3})
    """
    if not path.exists():
        raise CheckpointError("missing", f"File {path} does not exist.", fix="check the path")
    if not path.is_file():
        raise _unreadable(path, "it is a folder" if path.is_dir() else "it is not a regular file")
    if path.suffix == ".safetensors":
        weights, metadata = _from_safetensors(path)
    else:
        weights, metadata = _unwrapped(path, _from_torch(path))
    return ExternalWeights(_bare_names(path, weights), metadata)


def _from_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            notes = dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from None
    if not weights:
        raise _no_weights(path, "it is empty")
    # A tied weight is stored once; save_model puts its other names into the metadata.
    for name in [name for name, kept in notes.items() if kept in weights and name not in weights]:
        weights[name] = weights[notes.pop(name)]
    return weights, notes


def _from_torch(path: Path) -> Any:
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _check_archive(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))  # what torch refused to import
        raise (_foreign(path, "not a pickle") if code is None else _needs_code(path, code[1])) from None
    except Exception as error:  # a corrupted or forged file may raise anything
        first_line = str(error).partition("\n")[0]
        # torch looks up the first bytes as instructions: a KeyError says that it is no pickle at all.
        plain = isinstance(error, KeyError)
        seen = "not a pickle" if plain else f"{type(error).__name__}: {first_line[:100]}".removesuffix(": ")
        raise _foreign(path, seen) from None


def _check_archive(path: Path) -> None:
    """Verify checksums. torch does not, so flipped bits would go unnoticed."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.filename.endswith("/constants.pkl") for record in records):
            raise _needs_code(path, "a TorchScript program")
        for record in records:
            if record.CRC:  # 0 if saved without (torch.serialization.set_crc32_options)
                _read_through(archive, record)


def _read_through(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """zipfile verifies the checksum at the end of a record."""
    with archive.open(record) as content:
        while content.read(_PIECE):
            pass


def _unwrapped(path: Path, found: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The first state dict found, and the plain values around it."""
    metadata: dict[str, Any] = {}
    for _ in range(_MAX_DEPTH):
        if not isinstance(found, Mapping):
            break
        inner = next((key for key in WRAPPERS if isinstance(found.get(key), Mapping) and found[key]), None)
        weights = {key: value for key, value in found.items() if isinstance(key, str) and isinstance(value, Tensor)}
        if inner is None and weights:
            return weights, metadata | dict(_plain_values(found, besides=weights))
        if inner is None:
            raise _no_weights(path, f"its keys are {listed([str(key)[:60] for key in found], 8) or 'none'}")
        metadata |= dict(_plain_values(found, besides={inner: None}))
        found = found[inner]
    raise _no_weights(path, f"it contains a {type(found).__name__}")


def _plain_values(found: Mapping[Any, Any], besides: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if isinstance(value, Tensor) and value.ndim == 0:  # an accuracy, a loss
            value = value.item()
        if isinstance(key, str) and key not in besides and _is_plain(value, _MAX_DEPTH):
            yield key, value


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, Mapping):
        return depth > 0 and all(_is_plain(part, depth - 1) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(part, depth - 1) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _bare_names(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {name: ".".join(part for part in name.split(".") if part not in _ANYWHERE) for name in weights}
    while all(name.startswith(_FRONT) and name != _FRONT for name in names.values()):
        names = {old: name.removeprefix(_FRONT) for old, name in names.items()}
    if len(set(names.values())) < len(names):
        raise _no_weights(path, "removing the prefixes of wrappers gives two weights the same name")
    return {names[old]: tensor for old, tensor in weights.items()}


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError("unreadable", f"Can't read {path}: {reason}.")


def _foreign(path: Path, seen: str) -> CheckpointError:
    return _unreadable(path, f"it is corrupted, or was not written by torch.save ({seen})")


def _needs_code(path: Path, code: str) -> CheckpointError:
    return CheckpointError("needs-code", f"Loading {path} would execute code: {code}.")


def _no_weights(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "no-weights",
        f"No weights found in {path}: {reason}.",
        why=f"expected a state dict, or a dict with one under a key such as {', '.join(WRAPPERS[:6])}",
        fix="save only the state dict: torch.save(loaded[key], new_path)",
    )
