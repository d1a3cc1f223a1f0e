"""Models that were sharded or replicated before they are passed to the Trainer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import paceline
import tiny
from paceline.errors import LayoutError
from worlds import ranks


def refusal(model: nn.Module) -> str:
    with pytest.raises(LayoutError, match=r"layout\.wrapped-model") as caught:
        tiny.classifier_trainer(model)
    return str(caught.value)


@ranks(2)
def test_sharded_models_are_refused_with_the_setting_to_use() -> None:
    mesh = init_device_mesh("cpu", (2,))
    said = refusal(FullyShardedDataParallel(tiny.classifier(), device_id=torch.device("cpu")))
    assert "it is in FullyShardedDataParallel" in said and 'set strategy="fsdp"' in said
    model = tiny.classifier()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    said = refusal(model)
    assert "fully_shard was applied to it" in said and "strategy=\"fsdp\", and blocks=['0']" in said
    said = refusal(parallelize_module(tiny.classifier(), mesh, {"0": ColwiseParallel()}))
    assert "parameter 0.weight is a DTensor" in said and 'strategy="tp"' in said
    alone = torch_dist.new_group([torch_dist.get_rank()], use_local_synchronization=True)
    said = refusal(DistributedDataParallel(tiny.classifier(), process_group=alone))
    assert "process_group of 1 of 2 ranks" in said


class Sometimes(nn.Module):
    """Uses its second layer for the samples of one rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.first(inputs)
        return outputs if paceline.dist.rank() else outputs + self.second(inputs)


@ranks(2)
def test_find_unused_parameters_of_ddp_is_kept() -> None:
    wrapped = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    trainer = tiny.classifier_trainer(wrapped)
    assert len(trainer.train(tiny.blobs(), max_steps=2).losses) == 2
