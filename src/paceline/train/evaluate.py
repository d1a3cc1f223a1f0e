"""Evaluation that counts each sample exactly once, on any number of ranks.

Each rank runs its own share without talking to the others; sums and weights are added up at the end. A rank without
samples in a batch skips it, since nothing in an evaluation waits for anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.data.loader import Micro
from paceline.runtime import collectives
from paceline.runtime.noise import drawing
from paceline.runtime.seeds import mix
from paceline.train.step import LossModule

# A coordinate that no training step has, so that evaluation never reuses a step's noise.
_EVALUATION = -1


@torch.no_grad()
def evaluate(module: LossModule, micros: Iterator[Micro], device: torch.device, seed: int) -> float:
    """The mean loss over all samples of all ranks."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        for micro in micros:
            if micro.samples:
                totals += _sum_and_weight(module, micro, seed)
    finally:
        for part in training:  # one by one: the user may have frozen some
            part.training = True
    collectives.all_reduce(totals)
    total, weight = totals.tolist()
    return total / weight if weight else math.nan


def _sum_and_weight(module: LossModule, micro: Micro, seed: int) -> Tensor:
    where = mix(micro.step, micro.group)
    with drawing(seed, _EVALUATION, where, start=micro.start, own=micro.samples, rows=micro.group_samples):
        value, weight = module(micro.batch)
    if weight is None:
        value, weight = value * micro.samples, float(micro.samples)
    parts = [torch.as_tensor(part, dtype=torch.float64, device=value.device) for part in (value, weight)]
    return torch.stack(parts)
