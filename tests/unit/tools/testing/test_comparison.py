"""`paceline parity` and `paceline.testing.parity`: what they say of right and wrong models, and of wrong questions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
import tiny
from paceline.errors import ConfigError
from paceline.tools.cli.train import _read
from paceline.tools.testing.comparison import ParityLayout, parity


class RankNoise(nn.Module):
    """Wrong on purpose: what a rank adds depends on its number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs) + 0.1 * paceline.dist.rank())


def make(**settings: Any) -> paceline.Trainer:
    return paceline.Trainer(
        RankNoise(), {"name": "sgd", "lr": 0.1}, criterion=nn.CrossEntropyLoss(), batch=10, **settings
    )


def test_a_model_that_knows_its_rank_differs_and_the_parameter_is_named() -> None:
    report = parity(make, tiny.blobs(), layouts=["ddp:2", "tp:2"], steps=2)
    assert not report.holds
    assert report.rows[0].parameter == "first.weight" and "DIFFERS, first in first.weight" in str(report)
    assert report.rows[1].refused == "layout.no-tensor-plan"
    assert " - " in str(report)  # nothing was evaluated


def test_a_recipe_with_a_strategy_of_its_own_is_compared_under_the_layouts_that_are_asked_for() -> None:
    report = parity({**tiny.recipe("mlp"), "strategy": "fsdp"}, layouts=["shard=2", "fsdp:2"], steps=2)
    assert report.holds and [row.refused for row in report.rows] == [None, None]


def build_half_trained(**settings: Any) -> paceline.Trainer:
    model = RankNoise()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    return paceline.Trainer(model, optimizer, criterion=nn.CrossEntropyLoss(), batch=10, **settings)


def test_a_warning_appears_once_for_all_layouts_and_none_is_about_the_run_folder(capfd: Any) -> None:
    parity(tiny.recipe("mlp", save_best="loss", save_every=1, resume="auto"), layouts=["ddp:2"], steps=1)
    assert "warning" not in "".join(capfd.readouterr())
    parity(build_half_trained, tiny.blobs(), layouts=["ddp:2", "ddp:3", "fsdp:2"], steps=1)
    assert "".join(capfd.readouterr()).count("warning: ") == 1


@pytest.mark.parametrize("text", ["fspd:2", "shards=2", "ddp:two", ""])
def test_a_layout_that_does_not_exist_is_an_error_not_a_refusal(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParityLayout.read(text)
    assert caught.value.code == "config.bad-layout"


def test_settings_that_the_comparison_sets_are_left_to_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parity(lambda **settings: make(precision="bf16", **settings), tiny.blobs(), layouts=["ddp:2"], steps=1)
    assert caught.value.code == "config.parity-settings"


def test_bits_are_compared_under_deterministic_everywhere() -> None:
    report = parity({**tiny.recipe("mlp"), "batch": 26}, layouts=["ddp:3", "fsdp:2"], steps=2, bits=True)
    assert report.holds and report.precision == "fp32"
    assert [row.refused for row in report.rows] == [None, "layout.everywhere-and-layout"]
    assert "equal to the bit" in str(report)


def test_without_everywhere_bits_differ_and_the_parameter_is_named() -> None:
    report = parity({**tiny.recipe("mlp"), "batch": 26}, layouts=["ddp:3"], steps=2, precision="fp32", bound=0.0)
    assert not report.holds
    assert report.rows[0].parameter is not None and report.rows[0].weights < 1e-4


def test_bits_have_no_bound() -> None:
    with pytest.raises(ConfigError) as caught:
        parity(tiny.recipe("mlp"), bits=True, bound=1e-6)
    assert caught.value.code == "config.contradiction"


def test_commas_list_layouts_and_join_degrees() -> None:
    assert _read("fsdp:2,shard=2,tensor=2") == ["fsdp:2", "shard=2 tensor=2"]
    assert _read("ddp:2, pp:2") == ["ddp:2", "pp:2"]
