"""What a resumed run is compared with: the optimizer, scheduler, loss and data that a run was set up with.

They are the user's objects, and not part of the recipe. Their settings are saved in every checkpoint, as text, and a
resumed run logs a warning for each one that differs. Other settings are compared with the saved recipe.

A run also belongs to a script, which is its default name: `resume: auto` does not continue that of another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.data.batches import digest
from paceline.data.epoch_reader import length_of
from paceline.log import Log
from paceline.run import regular_files
from paceline.run.folder import RunFolder, existing_runs

# Implementation choices that do not affect results, and what is not a setting.
SWITCHES = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
_NOT_SETTINGS = {"initial_lr", "base_lrs", "last_epoch"}  # rates follow from the optimizer's lr
COUNTERS = ("last_epoch", "_step_count", "base_lrs", "_last_lr")  # of any torch scheduler
_SHOWN = 4
_ROWS = 16
_FIRST_MODELS: dict[str, str] = {}  # script → the class of the first model that it trains


class RunSetup:
    """The setup of this run. Taken right after the Trainer is created, before anything is loaded or scheduled."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, loss: Any, *, owns_optimizer: bool
    ) -> None:
        self._model, self._optimizer, self._owns_optimizer = model, optimizer, owns_optimizer
        self._groups = [_group_settings(group) for group in optimizer.param_groups]
        self._fixed: dict[str, Any] = {
            "optimizer": [{key: _text(value) for key, value in group.items()} for group in self._groups],
            "scheduler": None if scheduler is None else type(scheduler).__name__,
            "scheduler settings": {} if scheduler is None else _scheduler_settings(scheduler),
            "loss": _described(loss),
        }
        self.data: dict[str, Any] = {}  # once it is known

    def facts(self) -> dict[str, Any]:
        """The setup as plain values, for a checkpoint."""
        return {**self._fixed, "frozen": self._frozen(), **self.data}

    def keep_data(self, saved: Mapping[str, Any]) -> None:
        """Until training continues, the data is that of the loaded checkpoint."""
        self.data = {key: saved[key] for key in ("order", "content") if key in saved}

    def _frozen(self) -> list[str]:
        return sorted(name for name, parameter in self._model.named_parameters() if not parameter.requires_grad)

    def has_other_scheduler(self, saved: Mapping[str, Any]) -> bool:
        return bool(saved) and saved["scheduler"] != self._fixed["scheduler"]

    def report(self, saved: Mapping[str, Any], log: Log, *, partial: bool) -> None:
        """Log what differs from the setup of a loaded checkpoint. `partial`: this rank holds a part of the model."""
        if not saved:  # an older checkpoint
            return
        differences = [*self._optimizer_differences(saved["optimizer"]), *self._scheduler_differences(saved)]
        if saved["loss"] != self._fixed["loss"]:
            differences.append(f"loss was {saved['loss']}, now {self._fixed['loss']}")
        if not partial:
            differences += self._frozen_differences(set(saved["frozen"]))
        _warn(differences, log)

    def report_data(self, saved: Mapping[str, Any], log: Log) -> None:
        """The same for the data of this run."""
        differences = []
        if saved.get("order", self.data["order"]) != self.data["order"]:
            differences.append(f"the order of samples was {saved['order']}, now {self.data['order']}")
        if saved.get("content", self.data["content"]) != self.data["content"]:
            differences.append("the data has as many samples, but other ones")
        _warn(differences, log)

    def _optimizer_differences(self, saved: list[Mapping[str, str]]) -> Iterator[str]:
        for number, (group, now, was) in enumerate(
            zip(self._optimizer.param_groups, self._fixed["optimizer"], saved, strict=False)
        ):
            for key in now:
                if key not in was or was[key] == now[key]:
                    continue
                if self._owns_optimizer:  # the recipe is current, and its changes are logged
                    group[key] = self._groups[number][key]
                    continue
                where = f" of group {number}" if len(saved) > 1 else ""
                yield (
                    f"{key}{where} is {now[key]} in your optimizer, but {was[key]} in the checkpoint, which is used; "
                    "to change it, set optimizer.param_groups after the Trainer is created"
                )

    def _scheduler_differences(self, saved: Mapping[str, Any]) -> Iterator[str]:
        was, now = saved["scheduler"], self._fixed["scheduler"]
        if was != now:
            begins = "" if now is None else f", which continues at the count of {was}" if was else ", which begins now"
            yield f"scheduler was {was or 'none'}, now {now or 'none'}{begins}"
            return
        settings = self._fixed["scheduler settings"]
        for key, value in saved["scheduler settings"].items():
            if settings.get(key, value) != value:
                yield f"{key} of {now} is {settings[key]}, but {value} in the checkpoint, which is used"

    def _frozen_differences(self, saved: set[str]) -> Iterator[str]:
        frozen = set(self._frozen())
        for names, before, after in ((frozen - saved, "trained", "frozen"), (saved - frozen, "frozen", "trained")):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                yield f"{', '.join(sorted(names)[:_SHOWN])}{more}: {before} before, {after} now"


def data_facts(data: Any, fingerprint: Any, order: str) -> dict[str, Any]:
    """The content of training data, without reading samples, and the order in which they are read."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    content = [fingerprint, getattr(dataset, "_fingerprint", None), *_digests(dataset)]  # Hugging Face datasets have it
    return {"order": order, "content": crc32(repr(content).encode())}


def _digests(dataset: Any) -> Iterator[tuple[str, int]]:
    """Of the beginning of arrays that hold a value for each sample."""
    length = length_of(dataset)
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, (Tensor, numpy.ndarray)) and value.ndim and len(value) == length:
            rows = value[:_ROWS]
            if isinstance(rows, Tensor):
                yield name, digest(rows)
            elif not rows.dtype.hasobject:
                yield name, crc32(rows.tobytes())


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in SWITCHES | _NOT_SETTINGS}
    return {**settings, "lr": group.get("initial_lr", group["lr"])} if "lr" in settings else settings


def _scheduler_settings(scheduler: Any) -> dict[str, str]:
    state = scheduler.state_dict()
    kept = {key: value for key, value in state.items() if key in ("_milestones",) or not key.startswith("_")}
    settings = {key: _text(value) for key, value in kept.items() if key not in _NOT_SETTINGS and _is_plain(value)}
    for number, inner in enumerate(getattr(scheduler, "_schedulers", ())):  # SequentialLR, ChainedScheduler
        settings |= {f"{key} ({number})": text for key, text in _scheduler_settings(inner).items()}
        settings[f"scheduler {number}"] = type(inner).__name__
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Tensor):
        return f"{value.item():g}" if value.numel() == 1 else f"a tensor ({digest(value)})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_text(inner) for inner in value)})"
    return repr(value) if _is_plain(value) else type(value).__name__


def _described(value: Any) -> str:
    """A function by its name, and an object by its class and plain attributes."""
    if value is None:
        return "the model's"
    name = getattr(value, "__qualname__", None)
    return f"{name}()" if isinstance(name, str) else describe_object(value)


def describe_object(value: Any) -> str:
    """The class of an object and its settings, as far as they are numbers, text or tensors."""
    attributes = getattr(value, "__dict__", {})
    public = {key: inner for key, inner in attributes.items() if not key.startswith("_") and key != "training"}
    buffers = {key: inner for key, inner in getattr(value, "_buffers", {}).items() if inner is not None}
    known = {key: inner for key, inner in (public | buffers).items() if isinstance(inner, Tensor) or _is_plain(inner)}
    shown = {key: _text(inner) for key, inner in known.items()}
    return f"{type(value).__name__}({', '.join(f'{key}={text}' for key, text in shown.items())})"


def _warn(differences: list[str], log: Log) -> None:
    for difference in differences:
        log.warning(f"changed since this checkpoint: {difference}")


def main_script() -> Path | None:
    """The script of this process; None in a notebook, an interpreter or an installed program."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or sys.executable).absolute()
    installed = {Path(sys.executable).parent, Path(__file__).parents[2]}
    return None if "site-packages" in path.parts or path.parent in installed else path


def default_name(model: str) -> str:
    """The name of a run without a name, for a model of this class. A script's second model has its class added."""
    script = main_script()
    if script is None:
        return model
    name = (script.parent if script.stem == "__main__" else script).stem
    return name if _FIRST_MODELS.setdefault(str(script), model) == model else f"{name}-{model}"


def script_of(folder: RunFolder) -> str | None:
    """The script that last trained in a folder, relative to its parent, with which it may be moved; None if unknown."""
    try:
        return str(json.loads(regular_files.read_bytes(folder.derived))["script"]["value"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(name: str, script: Path | None) -> tuple[RunFolder | None, RunFolder | None]:
    """The newest run of a name that belongs to `script`, or to an unknown one; and a newer one that does not."""
    other = None
    for folder in existing_runs(name):
        if script is None or script_of(folder) in (None, os.path.relpath(script, folder.path.parent)):
            return folder, other
        other = other or folder
    return None, other
