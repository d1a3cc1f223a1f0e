"""paceline: distributed training in PyTorch.

Public names are imported on first use, so that the command line does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline import dist, errors
    from paceline.checkpoint.external import load_external_weights
    from paceline.config.recipe import Config
    from paceline.data.datasets import get_data, register_data
    from paceline.launcher.function import launch
    from paceline.models.losses import Loss
    from paceline.models.spec import ModelSpec, PipelineSpec
    from paceline.models.zoo import get_model, register_model
    from paceline.monitor.loggers import register_logger
    from paceline.optim.optimizers import register_optimizer
    from paceline.run.history import History
    from paceline.runtime.noise import noise
    from paceline.tools.search.function_sweep import sweep
    from paceline.tools.search.study import Study
    from paceline.train.trainer import Trainer

# public name -> (module, attribute); an attribute of None is the module itself.
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "Config": ("paceline.config.recipe", "Config"),
    "History": ("paceline.run.history", "History"),
    "Loss": ("paceline.models.losses", "Loss"),
    "ModelSpec": ("paceline.models.spec", "ModelSpec"),
    "PipelineSpec": ("paceline.models.spec", "PipelineSpec"),
    "Study": ("paceline.tools.search.study", "Study"),
    "Trainer": ("paceline.train.trainer", "Trainer"),
    "dist": ("paceline.dist", None),
    "errors": ("paceline.errors", None),
    "get_data": ("paceline.data.datasets", "get_data"),
    "get_model": ("paceline.models.zoo", "get_model"),
    "launch": ("paceline.launcher.function", "launch"),
    "load_external_weights": ("paceline.checkpoint.external", "load_external_weights"),
    "noise": ("paceline.runtime.noise", "noise"),
    "register_data": ("paceline.data.datasets", "register_data"),
    "register_logger": ("paceline.monitor.loggers", "register_logger"),
    "register_model": ("paceline.models.zoo", "register_model"),
    "register_optimizer": ("paceline.optim.optimizers", "register_optimizer"),
    "sweep": ("paceline.tools.search.function_sweep", "sweep"),
    "testing": ("paceline.testing", None),
}

__all__ = [
    "Config",
    "History",
    "Loss",
    "ModelSpec",
    "PipelineSpec",
    "Study",
    "Trainer",
    "dist",
    "errors",
    "get_data",
    "get_model",
    "launch",
    "load_external_weights",
    "noise",
    "register_data",
    "register_logger",
    "register_model",
    "register_optimizer",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise import_module("paceline.config.foreign_names").unknown_name("names", "paceline", name)
    module_name, attribute = _PUBLIC[name]
    module = import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
