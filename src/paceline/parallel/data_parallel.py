"""`strategy: dp`: one process, several GPUs, and a replica of the model on each for every forward.

Unlike torch's DataParallel, slices may be uneven: mean losses are weighted by the number of samples. It exists for
scripts that already use DataParallel; `ddp` is faster, as it neither copies the model in every step nor shares the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply, replicate

from paceline.data.batches import apply, rows_of, samples_in
from paceline.models.divisor import Divisor
from paceline.models.loss_module import changed_kind
from paceline.plan.slicing import slice_bounds

LossPart = tuple[Tensor, Tensor | float | Divisor | None]  # (mean, None), (mean, divisor) or (sum, weight)


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


def combine_losses(parts: Sequence[LossPart], samples: Sequence[int]) -> LossPart:
    """The loss of a batch from those of its slices: means are weighted by what they were divided by or by their number
    of samples, sums by the weight that the model returned. `samples` holds the number of samples of each slice; all
    values are on one device."""
    means = [weight is None or isinstance(weight, Divisor) for _, weight in parts]
    if any(means) and not all(means):
        raise changed_kind(sums=True)
    if parts[0][1] is None:
        total = sum(samples)
        shares = [value * (count / total) for (value, _), count in zip(parts, samples, strict=True)]
        return torch.stack(shares).sum(), None
    if isinstance(parts[0][1], Divisor):
        dtype = parts[0][0].dtype  # a quotient of integers would be rounded to float32
        counts = [torch.as_tensor(part[1].weight, dtype=dtype) for part in parts if isinstance(part[1], Divisor)]
        sums = [torch.where(count > 0, mean, 0.0) * count for (mean, _), count in zip(parts, counts, strict=True)]
        count = torch.stack(counts).sum()
        return torch.stack(sums).sum() / torch.where(count > 0, count, 1.0), Divisor(count)
    weight: Any = sum(weight for _, weight in parts if weight is not None)
    return torch.stack([value for value, _ in parts]).sum(), weight


def combine_metrics(parts: Sequence[Mapping[str, Any] | None], weights: Sequence[Any]) -> dict[str, Any] | None:
    """The weighted mean of each metric."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    total = sum(weights)
    return {
        name: sum(part[name] * weight for part, weight in zip(found, weights, strict=True)) / total for name in found[0]
    }
