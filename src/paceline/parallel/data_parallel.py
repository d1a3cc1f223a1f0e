"""`strategy: dp`: one process, several GPUs, and a replica of the model on each for every forward.

Unlike torch's DataParallel, slices may be uneven: mean losses are weighted by the number of samples. It exists for
scripts that already use DataParallel; `ddp` is faster, as it neither copies the model in every step nor shares the GIL.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import parallel_apply, replicate

from paceline.data.batches import apply, rows_of, samples_in
from paceline.models.divisor import Divisor
from paceline.parallel.loss_parts import LossPart, combine_losses
from paceline.plan.slicing import slice_bounds


class DataParallel(nn.Module):
    """Maps a batch to (mean or sum, weight or None) on several devices. Parameters are kept on the first one."""

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.module, self._devices = module, devices

    def forward(self, batch: Any) -> LossPart:
        total = samples_in(batch)
        devices = self._devices[:total]
        bounds = [slice_bounds(total, len(devices), index) for index in range(len(devices))]
        inputs = [
            (apply(rows_of(batch, start, stop), lambda tensor, device=device: tensor.to(device)),)  # type: ignore[misc]
            for (start, stop), device in zip(bounds, devices, strict=True)
        ]
        results = parallel_apply(replicate(self.module, devices), inputs, devices=devices)
        first = devices[0]
        moved = [(value.to(first), _to(weight, first)) for value, weight in results]
        return combine_losses(moved, [stop - start for start, stop in bounds])


def _to(weight: Any, device: torch.device) -> Any:
    if isinstance(weight, Divisor):
        return Divisor(torch.as_tensor(weight.weight, device=device))
    return None if weight is None else torch.as_tensor(weight, device=device)


def gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
