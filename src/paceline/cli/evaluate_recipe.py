"""Evaluates a recipe with saved weights, on every rank of a launch; on other nodes as a module with one argument: the
arguments of `evaluate` as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from math import isfinite
from typing import Any

from paceline.config.recipe import Config
from paceline.errors import TrainError
from paceline.run import folder
from paceline.train import factory
from paceline.train.trainer import Trainer

# What belongs to training: files, and where weights come from.
_WITHOUT: dict[str, Any] = {
    "run": False, "resume": None, "init_from": None, "loggers": [], "profile": None, "save_every": None,
    "save_minutes": None, "save_best": None, "early_stop": None,
}  # fmt: skip


def main(request: str) -> None:
    evaluate(**json.loads(request))


def evaluate(recipe: Mapping[str, Any], weights: str, *, as_json: bool) -> None:
    """Evaluate the recipe's model with the weights of a run, a checkpoint or a file; rank 0 prints the result. With
    `as_json`, nothing else is printed to standard output."""
    config = Config.from_dict({**recipe, **_WITHOUT})
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        val = factory.build_data(config)[1]
        if val is None:
            raise TrainError(
                "no-evaluation",
                "The data of the recipe has no evaluation set.",
                fix="return (training set, evaluation set) from the function that makes it",
            )
        trainer = Trainer.from_config(config)
        trainer.load_checkpoint(weights, weights_only=True)
        values = trainer.evaluate(val).values
        if trainer._engine.average is not None:
            with trainer.ema_weights():
                values |= {f"ema_{name}": value for name, value in trainer.evaluate(val).values.items()}
    if trainer.is_main_process:
        print(_shown(trainer, values, as_json), flush=True)


def _shown(trainer: Trainer, values: Mapping[str, float], as_json: bool) -> str:
    source = trainer._restorer.loaded
    assert source is not None
    if as_json:
        metrics = {name: value if isfinite(value) else None for name, value in values.items()}
        return json.dumps({"checkpoint": folder.short(source.path), "step": source.step, "metrics": metrics}, indent=2)
    width = max(map(len, ("checkpoint", *values)))
    rows = [f"{name:<{width}}  {value:.6g}" for name, value in values.items()]
    return "\n".join([f"{'checkpoint':<{width}}  {source}", *rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
