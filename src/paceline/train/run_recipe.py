"""A recipe on one rank, from its objects to the last line on screen."""

from __future__ import annotations

from typing import Any

import torch

from paceline.config.recipe import Config
from paceline.run import folder
from paceline.train import factory
from paceline.train.history import History
from paceline.train.trainer import Trainer


def run_recipe(config: Config) -> History:
    """Train what the recipe describes; rank 0 then says how it went."""
    trainer = Trainer.from_config(config)
    data, val = factory.build_data(config)
    history = trainer.train(data, val)
    if trainer.is_main_process:
        print(summary(trainer, history, val), flush=True)  # noqa: T201
    return history


def summary(trainer: Trainer, history: History, val: Any) -> str:
    """The loss at start and end, beside what simple models reach; what the model writes; where everything lies."""
    lines = [""]
    if history.steps:
        lines.append(f"loss at the start  {history.steps[0]['loss']:.4f}")
        lines.append(f"loss at the end    {history.steps[-1]['loss']:.4f}")
    if history.evaluations:
        loss = history.evaluations[-1]["loss"]
        lines.append(f"on held-out data   {loss:.4f}")
        for name, reached in getattr(val, "baselines", dict)().items():
            verdict = "beaten" if loss < reached else "not beaten yet: train longer"
            lines.append(f"{name + ' model':<18} {reached:.4f}  ({verdict})")
    sample = _sample(trainer, val)
    if sample:
        lines.append(f"\nthe model writes:\n{sample}")
    if history.run:
        lines.append(f"\nrun folder: {folder.short(history.run)}")
    return "\n".join(lines)


def _sample(trainer: Trainer, val: Any) -> str | None:
    """Text from a model that can write, on data that is text."""
    generate = getattr(trainer.model, "generate", None)
    decode = getattr(val, "decode", None)
    if generate is None or decode is None or not trainer._engine.layout.degrees.is_replicated:
        return None  # rank 0 is alone here: what is cut over ranks it can't run
    prompt = val.prompt().to(trainer.world.device)
    torch.manual_seed(trainer.config.seed)
    text: str = decode(generate(prompt[None], 240)[0])
    return "\n".join("    " + line for line in text.splitlines())
