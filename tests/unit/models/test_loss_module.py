from __future__ import annotations

import torch
from torch import nn

from paceline.models.loss_module import CRITERION, LossModule
from paceline.models.model_call import stateful


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_only_a_module_of_the_user_with_buffers_or_parameters_belongs_to_the_run() -> None:
    scaled = Scaled()
    assert stateful(None, print) is None and stateful(nn.CrossEntropyLoss(torch.ones(3)), None) is None
    assert stateful(scaled, None) is scaled and stateful(None, scaled) is scaled


def test_a_criterion_is_a_submodule_only_if_it_is_trained() -> None:
    scaled = Scaled()
    assert f"{CRITERION}.scale" in dict(LossModule(nn.Linear(1, 1), None, scaled).named_parameters())
    scaled.requires_grad_(False)
    assert len(list(LossModule(nn.Linear(1, 1), None, scaled).named_parameters())) == 2
