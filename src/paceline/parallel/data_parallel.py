"""Data parallelism. `ddp`: every rank holds a replica; gradients are averaged during the backward (torch's DDP).

`strategy: dp`: one process, several GPUs, and a replica of the model on each for every forward. Unlike torch's
DataParallel, slices may be uneven: mean losses are weighted by the number of samples. It exists for scripts that
already use DataParallel; `ddp` is faster, as it neither copies the model in every step nor shares the GIL.

A `CommHook` reduces DDP's gradients in place of its all-reduce:

    hook = CommHook(powerSGD_hook, PowerSGDState(None))
    hook.register(ddp)

DDP calls it for each bucket of gradients, as soon as the backward has filled the bucket. It returns a future of their
mean over the ranks. The weight-zero steps of the pre-flight are reduced without it: a hook that counts steps or carries
an error to the next step sees training steps only, and buckets that do not change any more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel, parallel_apply
from torch.nn.parallel import replicate as replicate_on_devices
from torch.utils._python_dispatch import _disable_current_modes

from paceline.config.sections import DdpSection
from paceline.data.batches import apply, rows_of, samples_in
from paceline.errors import LayoutError, TrainError
from paceline.models.divisor import Divisor
from paceline.models.loss_module import changed_kind
from paceline.models.usage_errors import require_trainable
from paceline.models.weights import as_moved
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.plan.slicing import slice_bounds
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh, broadcast_from_first

LossPart = tuple[Tensor, Tensor | float | Divisor | None]  # (mean, None), (mean, divisor) or (sum, weight)
Reduce = Callable[[Any, GradBucket], Future[Tensor]]


class CommHook:
    """`reduce(state, bucket)` has the signature of torch's hooks."""

    def __init__(self, reduce: Reduce, state: Any = None, name: str = "") -> None:
        self.reduce, self.state = reduce, state
        self.name = name or getattr(reduce, "__qualname__", type(reduce).__qualname__)
        self._suspended = False

    def register(self, ddp: DistributedDataParallel) -> None:
        # torch compares annotations with its own types, but those of a module with `from __future__ import annotations`
        # are strings. A lambda has none.
        ddp.register_comm_hook(self, lambda hook, bucket: hook(bucket))

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        if self._suspended:
            return average(bucket)
        with _disable_current_modes():  # which count the FLOPs of the model
            result = self.reduce(self.state, bucket)
        if not isinstance(result, torch._C.Future):  # which collectives return
            raise TrainError(
                "comm-hook-result",
                f"The communication hook {self.name} returned {type(result).__name__}, expected torch.futures.Future.",
            )
        return result

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Reduce without the hook."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False


def average(bucket: GradBucket) -> Future[Tensor]:
    """The mean of a bucket over all ranks, as DDP computes it without a hook."""
    buffer = bucket.buffer().div_(torch_dist.get_world_size())
    reduced: Future[list[Tensor]] = torch_dist.all_reduce(buffer, async_op=True).get_future()
    return reduced.then(lambda done: done.value()[0])


def apply_data_parallel(parts: ModelParts, context: PassContext) -> str:
    found = gpus()
    if len(found) > 1:
        parts.forward, parts.slices = DataParallel(parts.module, found), True
        return f'dp: one process, {len(found)} GPUs; strategy="ddp" with `paceline launch` is faster'
    count = "one GPU" if found else "no GPU"
    return f'dp: {count}, running on {context.mesh.device}; for several ranks: paceline launch -n 2, strategy="ddp"'


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
        results = parallel_apply(replicate_on_devices(self.module, devices), inputs, devices=devices)
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


def replicate(
    step: nn.Module,
    device: torch.device,
    settings: DdpSection,
    *,
    allow_unused: bool = False,
    hook: CommHook | None = None,
    bucket_mb: float | None = None,
    again: bool = False,
) -> DistributedDataParallel:
    """Wrap the step in DDP, which broadcasts the weights of rank 0 unless it is built `again`. `bucket_mb`: instead of
    that in the settings, which may be `auto`."""
    types = sorted({parameter.device.type for parameter in step.parameters()})
    if len(types) > 1:
        raise LayoutError(
            "copies-on-mixed-devices",
            f"The model has layers on {' and '.join(types)}, but there are {collectives.world()} ranks.",
        )
    require_trainable(getattr(step, "model", step))
    # device_ids must be omitted for a model on several GPUs.
    one_device = len({parameter.device for parameter in step.parameters()}) == 1
    options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" and one_device else {}
    if bucket_mb is not None:
        # An explicit size also applies to the first bucket, which torch keeps small to start the reduction early.
        options["bucket_cap_mb"] = bucket_mb
    if not settings.broadcast_buffers:
        # Renamed in torch 2.13; the old name is deprecated.
        new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if new else "broadcast_buffers"] = False
    _exclude_unmovable(step, broadcast=not again)
    ddp = DistributedDataParallel(
        step,
        static_graph=settings.static_graph,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        find_unused_parameters=allow_unused and not settings.static_graph,
        init_sync=not again,
        **options,
    )
    if hook is not None:
        hook.register(ddp)
    return ddp


def _exclude_unmovable(step: nn.Module, *, broadcast: bool) -> None:
    """Keep tensors whose dtype no backend moves (int16, float8) from DDP, and move their bytes."""
    named = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    odd = {name: tensor.detach() for name, tensor in named.items() if as_moved(tensor) is not tensor}
    if odd:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, list(odd))
    for tensor in odd.values() if broadcast else ():
        collectives.broadcast(as_moved(tensor))


def broadcast_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast buffers (running statistics) over the data ranks. DDP does so before each forward but not after the
    last one, and all ranks must evaluate the same model. With local steps: over those of this replica."""
    if mesh.data_ranks > mesh.local_replicas:
        for buffer in model.buffers():
            broadcast_from_first(as_moved(buffer), mesh.data_group)
