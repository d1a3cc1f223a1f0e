"""DDP with a compression as its communication hook, and a module whose gradients a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.data_parallel import CommHook
from paceline.parallel.sync.compression import Compression
from paceline.parallel.sync.exchange import Exchange


class ChosenGradients(nn.Module):
    """The gradient of each parameter is the tensor that `forward` got for it."""

    def __init__(self, *sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        products = [(weight * value).sum() for weight, value in zip(self.weights, gradients, strict=True)]
        return torch.stack(products).sum()


def own_exchange() -> Exchange:
    return Exchange(torch_dist.new_group())


def hook_of(compression: Compression) -> CommHook:
    return CommHook(lambda state, bucket: state.reduce(bucket), compression)


def wrap(
    model: nn.Module, compression: Compression, hook: CommHook | None = None, **options: Any
) -> DistributedDataParallel:
    """Several buckets, of a few KB each. `hook`: calls the compression, unless it is suspended."""
    settings = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True, **options}
    ddp = DistributedDataParallel(model, **settings)
    compression.begin({parameter: name for name, parameter in model.named_parameters()})
    (hook or hook_of(compression)).register(ddp)
    return ddp


def random_like(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def true_mean(model: nn.Module, step: int) -> list[Tensor]:
    own = [random_like(model, rank, step) for rank in range(torch_dist.get_world_size())]
    return [torch.stack(parts).double().mean(0) for parts in zip(*own, strict=True)]


def step(ddp: DistributedDataParallel, gradients: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
    """The gradients after a backward."""
    ddp.zero_grad()
    (ddp(gradients) * scale).backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def same_on_all_ranks(tensors: Sequence[Tensor]) -> bool:
    for tensor in tensors:
        own = tensor.reshape(-1).view(torch.uint8)
        copies = [torch.empty_like(own) for _ in range(torch_dist.get_world_size())]
        torch_dist.all_gather(copies, own)
        if not all(torch.equal(copies[0], copy) for copy in copies):
            return False
    return True


def mean_over_ranks(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    means = {name: tensor.to(torch.float64, copy=True).contiguous() for name, tensor in sorted(state.items())}
    for tensor in means.values():
        torch_dist.all_reduce(tensor)
        tensor /= torch_dist.get_world_size()
    return means
