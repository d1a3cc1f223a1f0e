"""What a layout refuses, in this order: settings, the model, and what only ranks know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.log import rank_log
from paceline.parallel.pipeline.stage_partition import StagePartition
from paceline.plan.layout import LayoutPlan
from paceline.runtime.environment import RankInfo
from paceline.runtime.process_group import World
from paceline.train.checks.layout_checks import check_layout
from paceline.train.trainer_kwargs import UserObjects


def check_on_two_ranks(
    model: nn.Module, user: UserObjects, **settings: Any
) -> tuple[LayoutPlan, StagePartition | None]:
    """As on the first of two ranks: without a process group, what is gathered is that of this one."""
    world = World(RankInfo(rank=0, world=2, local_rank=0, local_world=2), torch.device("cpu"), "")
    return check_layout(Config.from_dict(settings), model, user, None, world, rank_log(0, quiet=True))


def linear_layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def test_the_stages_of_a_pipeline_are_kept() -> None:
    layout, partition = check_on_two_ranks(linear_layers(), UserObjects(), strategy="pp")
    assert layout.degrees.pipeline == 2
    assert partition is not None and partition.stages == (("0", "1"), ("2", "3"))
    assert check_on_two_ranks(linear_layers(), UserObjects(), strategy="ddp")[1] is None


@pytest.mark.parametrize(
    ("code", "model", "settings"),
    [
        ("layout.pipeline-and-compile", nn.Linear(4, 4), {"strategy": "pp", "compile": "model"}),
        ("layout.no-pipeline-spec", nn.Linear(4, 4), {"strategy": "pp"}),
        ("layout.sparse-gradients", nn.Sequential(nn.Embedding(9, 4, sparse=True)), {"strategy": "ddp"}),
        ("layout.pipeline-and-loss-fn", linear_layers(), {"strategy": "pp"}),
    ],
)
def test_what_is_refused_first(code: str, model: nn.Module, settings: dict[str, Any]) -> None:
    user = UserObjects(loss_fn=lambda model, batch: model(batch).sum())
    with pytest.raises(LayoutError) as caught:
        check_on_two_ranks(model, user, **settings)
    assert caught.value.code == code
