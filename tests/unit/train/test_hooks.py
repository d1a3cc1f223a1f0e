"""Hooks of features: which are called, in which order, and how they come and go."""

from __future__ import annotations

from typing import Any

import torch

import paceline
from paceline.train.hooks import SLOTS, Hooks, HookTable


def run_steps(hooks: Hooks, steps: int = 1, **settings: Any) -> paceline.Trainer:
    """Train with them, two micro-batches a step."""
    settings = {"criterion": torch.nn.MSELoss(), "batch": 8, "accumulate": 2, "run": False, "quiet": True} | settings
    trainer = paceline.Trainer(torch.nn.Linear(4, 1), **settings)
    trainer._engine.hooks.set(hooks)
    trainer.train(torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), max_steps=steps)
    return trainer


def test_a_step_calls_each_slot_once_per_micro_batch_or_step() -> None:
    called: list[str] = []
    slots: dict[str, Any] = {slot: lambda *_, slot=slot: called.append(slot) or {} for slot in SLOTS}
    run_steps(Hooks(name="noting", **slots))
    micro = ["before_micro", "before_forward", "before_backward", "after_backward"]
    backwards = ["begin", *micro, *micro, "all_backwards", "on_losses", "on_reduced"]
    update = ["unscale", "on_gradients", "vetoes", "before_update", "take_step", "after_update", "end_of_update"]
    assert called == [*backwards, *update, "values", "after_step", "end"]


def test_a_veto_keeps_the_parameters_and_tells_the_others() -> None:
    noted: list[Any] = []
    hooks = Hooks(
        name="veto",
        vetoes=lambda: True,
        before_update=noted.append,
        take_step=lambda: noted.append("stepped"),
        after_update=lambda *step: noted.append(step),
        after_step=lambda *step: noted.append(step),
    )
    assert run_steps(hooks, steps=2).step_count == 2
    assert noted == [0, (1, False), (1, False), 1, (2, False), (2, False)]


def test_a_feature_may_take_the_step_and_say_that_it_skipped_it() -> None:
    assert run_steps(Hooks(name="noting", take_step=lambda: 1.0))._engine.updater.skipped == 1.0


def test_nothing_unscales_gradients_that_no_feature_looks_at() -> None:
    called: list[str] = []
    run_steps(Hooks(name="scale", unscale=lambda _: called.append("unscale")))
    assert called == []
    run_steps(Hooks(name="scale", unscale=lambda _: called.append("unscale")), clip_norm=1.0)
    assert called == ["unscale"]


def test_a_feature_that_replaces_its_hooks_keeps_its_place() -> None:
    table, called = HookTable(), list[str]()
    for name in ("first", "second"):
        table.set(Hooks(name=name, after_step=lambda _, name=name: called.append(name)))
    table.set(Hooks(name="first", after_step=lambda _: called.append("changed")))
    for hook in table.after_step:
        hook(1)
    assert called == ["changed", "second"]


def test_a_hook_may_remove_its_feature_while_it_is_called() -> None:
    table, called = HookTable(), list[str]()
    table.set(Hooks(name="once", after_step=lambda _: (called.append("once"), table.set(Hooks(name="once")))[0]))
    table.set(Hooks(name="always", after_step=lambda _: called.append("always")))
    for step in range(2):
        for hook in table.after_step:
            hook(step)
    assert called == ["once", "always", "always"]
    assert all(getattr(table, slot) == () for slot in SLOTS if slot != "after_step")
