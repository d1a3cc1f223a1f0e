"""What leaves a run goes through one view, which a feature may replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint.local_store import locate
from paceline.checkpoint.reader import open_checkpoint, read_tensors
from paceline.checkpoint.state import TrainingState
from paceline.checkpoint.writer import Description, Writer
from paceline.errors import TrainError
from paceline.train.checkpointing.entries import training_state
from paceline.train.weights_view import WeightsView, weights_view
from resumable import points, trainer


def last_layer_only(view: WeightsView) -> WeightsView:
    """A view as of adapters: less than the model has, by other names."""

    def entries(**options: Any) -> dict[str, Any]:
        found = view.entries(**options)
        return {f"adapter.{name}": each for name, each in found.items() if name.startswith("last.")}

    return replace(view, entries=entries)


def state_through(one: Any, change: Callable[[WeightsView], WeightsView]) -> TrainingState:
    return training_state(one._engine, change(weights_view(one._engine)), one._policy, one._callbacks)


def save(folder: Path, state: TrainingState) -> None:
    snapshot = state.capture(without=["optimizer"])
    description = Description(0, 0, optimizer=False, state=snapshot.values, aliases=snapshot.aliases)
    Writer().begin(locate(folder), snapshot.tensors, description).result()


def test_a_feature_chooses_what_a_checkpoint_and_a_state_dict_have(tmp_path: Path) -> None:
    one = trainer()
    one.train(points(), max_steps=2)
    view = last_layer_only(weights_view(one._engine))
    assert sorted(view.state_dict()) == ["adapter.last.bias", "adapter.last.weight"]
    save(tmp_path / "c", state_through(one, last_layer_only))
    names = [name for name in open_checkpoint(locate(tmp_path / "c")).manifest.tensors if name.startswith("model/")]
    assert sorted(names) == ["model/adapter.last.bias", "model/adapter.last.weight"]


def test_what_a_view_leaves_out_stays_when_its_checkpoint_is_loaded(tmp_path: Path) -> None:
    one, other = trainer(), trainer()
    one.train(points(), max_steps=2)
    save(tmp_path / "c", state_through(one, last_layer_only))
    first = other.model.first.weight.clone()
    state = state_through(other, last_layer_only)
    state.apply(state.read(open_checkpoint(locate(tmp_path / "c")), weights_only=True))
    assert torch.equal(other.model.last.weight, one.model.last.weight)
    assert torch.equal(other.model.first.weight, first) and not torch.equal(first, one.model.first.weight)


def test_a_view_may_show_copies_in_full_precision(tmp_path: Path) -> None:
    """As of masters: the model computes in half precision, and files have float32."""
    one = trainer()
    masters = {name: each.detach().double() + 1e-9 for name, each in one.model.named_parameters()}

    def with_masters(view: WeightsView) -> WeightsView:
        return replace(view, entries=lambda **options: {**view.entries(**options), **masters})

    save(tmp_path / "c", state_through(one, with_masters))
    checkpoint = open_checkpoint(locate(tmp_path / "c"))
    saved = read_tensors(checkpoint, {"model/last.weight": torch.empty(1, 8, device="meta")})
    assert torch.equal(saved["model/last.weight"], masters["last.weight"])


def test_a_view_swaps_the_weights_that_are_evaluated() -> None:
    one = trainer()
    own = one.model.last.weight.detach().clone()

    class Zeros:
        def __enter__(self) -> None:
            nn.init.zeros_(one.model.last.weight)

        def __exit__(self, *exc: object) -> None:
            with torch.no_grad():
                one.model.last.weight.copy_(own)

    view = replace(weights_view(one._engine), swapped=Zeros)
    with view.evaluated():
        assert not one.model.last.weight.any()
    state: dict[str, Tensor] = view.state_dict()
    assert not state["last.weight"].any() and torch.equal(one.model.last.weight, own) and own.any()


def test_there_are_no_averaged_weights_without_ema() -> None:
    with pytest.raises(TrainError, match=r"train\.no-ema"):
        trainer().ema_weights()
