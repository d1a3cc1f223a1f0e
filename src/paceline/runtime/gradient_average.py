"""Averages gradients over ranks, where DDP does not: it reduces them only after its own forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

Group = torch_dist.ProcessGroup | None
_BUCKET_BYTES = 64 << 20


@torch.no_grad()
def average_gradients(module: nn.Module, device: torch.device, group: Group) -> None:
    """Average the gradients over the ranks of a group. Collective."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
    torch_dist.all_reduce(reached, group=group)
    held = [p for p, count in zip(parameters, reached.tolist(), strict=True) if count]
    for parameter in held:
        if parameter.grad is None:  # another rank has a gradient
            parameter.grad = torch.zeros_like(parameter)
    bucket: list[Tensor] = []
    for gradient in [p.grad for p in held if p.grad is not None]:
        if bucket and (bucket[0].dtype != gradient.dtype or _bytes([*bucket, gradient]) > _BUCKET_BYTES):
            _average(bucket, group)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _average(bucket, group)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _average(bucket: list[Tensor], group: Group) -> None:
    flat: Any = _flatten_dense_tensors(bucket)
    torch_dist.all_reduce(flat, group=group)
    flat.div_(torch_dist.get_world_size(group))
    for gradient, reduced in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
        gradient.copy_(reduced)
