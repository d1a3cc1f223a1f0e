"""From a recipe to objects, and from a run to its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import show
from paceline.config.derive import Derived
from paceline.config.recipe import Config
from paceline.data.named import get_data
from paceline.errors import CheckpointError, TrainError
from paceline.models.registry import get_model
from paceline.runtime import collectives, environment, folder, seeds


def build_model(config: Config) -> nn.Module:
    """The recipe's model, with the same initial weights on every rank."""
    seeds.seed_everything(seeds.mix(config.seed, 0) >> 1)
    return get_model(config.model.name)(config)


def build_data(config: Config) -> tuple[Any, Any]:
    """The recipe's training and evaluation sets."""
    return get_data(config.data.name, **config.data.options())


def require_same_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    strange = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise TrainError(
            "other-parameters",
            f"The optimizer holds {strange} parameters that are not the model's.",
            why="it would update weights that the loss does not depend on, and leave the model as it is",
            fix="build the optimizer from model.parameters() of the model that you give to the Trainer",
        )


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise CheckpointError(
            "other-model",
            f"The checkpoint {source} does not fit this model: {error}",
            fix="build the model with the options it was saved with (config.yaml in the run folder)",
        ) from None


def open_run(config: Config, model: nn.Module, is_main: bool) -> Path | None:
    """The run folder, the same on every rank: the launcher's, or a new one that rank 0 makes."""
    if config.run is False:
        return None
    path = None
    if is_main:
        given = environment.run_folder()
        name = config.run if isinstance(config.run, str) else type(model).__name__.lower()
        path = given or str(folder.create(name))
    path = collectives.broadcast_object(path)
    return Path(path)


def write_run(run: Path, config: Config, rows: Mapping[str, Derived]) -> None:
    (run / "config.yaml").write_text(show.effective(config) + "\n")
    (run / "derived.json").write_text(json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1))
