"""`strategy: dp`: one process, several GPUs, a copy of the model on each for every forward.

torch's DataParallel, but for how batches are sliced and losses combined: a mean over devices that hold different
numbers of samples is weighed by them. It is here because people have such scripts; `ddp` is faster, since it neither
copies the model in every step nor shares one Python between the devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import parallel_apply
from torch.nn.parallel import replicate as copies_on

from paceline.data.batches import apply, rows_of, samples_in
from paceline.data.slicing import cut
from paceline.parallel.loss_parts import LossPart, combine_losses


class DataParallel(nn.Module):
    """From a batch to (mean or sum, weight or None), computed on several devices; the parameters live on the first."""

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.module, self._devices = module, devices

    def forward(self, batch: Any) -> LossPart:
        total = samples_in(batch)
        devices = self._devices[:total]
        bounds = [cut(total, len(devices), number) for number in range(len(devices))]
        parts = [
            (apply(rows_of(batch, start, stop), lambda tensor, device=device: tensor.to(device)),)  # type: ignore[misc]
            for (start, stop), device in zip(bounds, devices, strict=True)
        ]
        results = parallel_apply(copies_on(self.module, devices), parts, devices=devices)
        home = devices[0]
        moved = [
            (value.to(home), None if weight is None else torch.as_tensor(weight, device=home))
            for value, weight in results
        ]
        return combine_losses(moved, [stop - start for start, stop in bounds])


def gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
