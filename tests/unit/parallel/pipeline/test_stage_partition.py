"""Cutting a model into stages: who holds what, under which names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.recipe import Config
from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.models.gpt import GPT
from paceline.models.mlp import MLP
from paceline.models.resnet import BasicBlock, ResNet, _small_stem
from paceline.parallel.pipeline.schedule_runner import build_stages
from paceline.parallel.pipeline.stage_partition import StagePartition, partition_model, remove_other_stages
from paceline.train import recipe_objects


def gpt(**options: Any) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(**{"layers": 4, "width": 16, "heads": 2, "vocabulary": 32, "context": 8, **options})


def layers(partition: StagePartition) -> list[list[str]]:
    return [list(keys) for keys in partition.stages]


def test_stages_in_a_row_compute_what_the_model_computes() -> None:
    inputs = torch.randint(0, 32, (3, 8))
    for settings in (PipelineSection(), PipelineSection(schedule="interleaved")):
        partition = partition_model(gpt(), settings, 2)
        models = [gpt(), gpt()]
        for rank, model in enumerate(models):
            remove_other_stages(model, partition, rank)
        of_ranks = [iter(build_stages(model, partition, rank)) for rank, model in enumerate(models)]
        hidden: Any = inputs
        for number in range(len(partition.stages)):
            hidden = next(of_ranks[number % 2])(hidden)
        assert torch.equal(hidden, gpt()(inputs))


def test_what_is_left_keeps_its_names_and_nothing_is_lost() -> None:
    whole = gpt()
    partition = partition_model(whole, PipelineSection(balance=[1, 3]), 2)
    models = [gpt(), gpt()]
    for rank, model in enumerate(models):
        remove_other_stages(model, partition, rank)
    names = [set(model.state_dict()) for model in models]
    assert names[0] | names[1] == set(whole.state_dict()) and not names[0] & names[1]
    assert {name.split(".")[1] for name in names[1] if name.startswith("blocks")} == {"1", "2", "3"}
    assert "tokens.weight" in names[0] and "head.weight" in names[1]
    (tied,) = partition.tied
    assert tied.holders == {0: "tokens.weight", 1: "head.weight"}


def test_nothing_is_allocated_for_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = gpt()
    remove_other_stages(model, partition_model(model, PipelineSection(), 2), 1)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_memory_counts_embeddings_and_time_does_not() -> None:
    model = gpt(vocabulary=4096)  # its embedding is larger than all blocks together
    assert layers(partition_model(model, PipelineSection(cost="memory"), 2)) == [["0", "1"], ["2", "3"]]
    assert layers(partition_model(model, PipelineSection(cost="time"), 2)) == [["0", "1", "2"], ["3"]]


def test_layers_without_weights_go_with_the_one_before_them() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout())
    assert layers(partition_model(model, PipelineSection(), 2)) == [["0", "1", "2"], ["3", "4", "5"]]
    assert layers(partition_model(model, PipelineSection(balance=["0", "2"]), 2)) == [["0", "1"], ["2", "3", "4", "5"]]
    assert layers(partition_model(MLP(8, 4, 2), PipelineSection(), 3)) == [["0", "1"], ["2", "3"], ["4"]]


class Lost(GPT):
    def __init__(self) -> None:
        super().__init__(layers=2, width=16, heads=2)
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("model", "settings", "code"),
    [
        (lambda: nn.Linear(2, 2), {}, "no-pipeline-spec"),
        (Lost, {}, "no-pipeline-spec"),
        (lambda: gpt(layers=2), {"schedule": "interleaved"}, "too-few-blocks"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {}, "too-few-blocks"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), {"balance": [1, 1]}, "balance"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()), {"balance": [2, 1]}, "balance"),
        (gpt, {"balance": ["blocks.0", "blocks.9"]}, "balance"),
        (gpt, {"balance": [1, 2]}, "balance"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {}, "pipeline-and-batchnorm"),
        (lambda: ResNet(_small_stem(8), BasicBlock, [1, 1], [8, 16], 4), {}, "no-pipeline-spec"),
        (gpt, {"microbatches": 1}, "microbatches"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_partitioned_is_refused(model: Any, settings: dict[str, Any], code: str) -> None:
    with pytest.raises(LayoutError) as found:
        partition_model(model(), PipelineSection(**settings), 2)
    assert found.value.code == f"layout.{code}"


def test_a_recipe_that_cannot_be_partitioned_is_refused_before_ranks_start() -> None:
    recipe = {"model": {"name": "gpt", "layers": 3}, "data": {"name": "stdlib-text"}, "batch": 8, "strategy": "pp"}
    config = Config.from_dict({**recipe, "train": {"max_steps": 1}})
    recipe_objects.check(config, 3)
    with pytest.raises(LayoutError) as found:
        recipe_objects.check(config, 4)
    assert found.value.code == "layout.too-few-blocks"
