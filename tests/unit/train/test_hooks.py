"""Hooks of features: which are called, in which order, and how they come and go."""

from __future__ import annotations

from typing import Any

import torch

import paceline
from paceline.train.hooks import SLOTS, Hooks, HookTable


def test_a_step_calls_each_slot_once_per_micro_batch_or_step() -> None:
    trainer = paceline.Trainer(torch.nn.Linear(4, 1), criterion=torch.nn.MSELoss(), batch=8, accumulate=2, run=False)
    called: list[str] = []
    slots: dict[str, Any] = {slot: lambda *_, slot=slot: called.append(slot) for slot in SLOTS}
    trainer._engine.hooks.set(Hooks(name="noting", **slots))
    trainer.train(torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), max_steps=1)
    micro = ["before_micro", "before_forward", "before_backward", "after_backward"]
    assert called == [*micro, *micro, "on_losses", "on_reduced", "after_step"]


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
