"""A function that reduces DDP's gradients in place of its all-reduce.

    hook = CommHook(powerSGD_hook, PowerSGDState(None))
    hook.register(ddp)

DDP calls it for each bucket of gradients, as soon as the backward has filled the bucket. It returns a future of their
mean over the ranks. The weight-zero steps of the pre-flight are reduced without it: a hook that counts steps or carries
an error to the next step sees training steps only, and buckets that do not change any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from paceline.errors import TrainError

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
                why="DDP waits for the reduced gradients at the end of the backward",
                fix="return the future of the collective: dist.all_reduce(…, async_op=True).get_future().then(…); for "
                "a tensor that is ready, future = torch.futures.Future(), future.set_result(tensor)",
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
