"""The FLOPs that this rank computes per sample, counted once per call of `train()`.

An eager model is counted while it runs its second micro-batch, for the price of some Python calls. The first one shows
whether it is compiled: torch.compile runs eagerly inside a dispatch mode, with other rounding and more memory, so a
compiled model is counted on fake tensors instead, uncompiled, which computes nothing. An eager model in a process that
has compiled another one may contain compiled functions, and is not counted. A model that cannot be counted has no
figures: wrong ones would be worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from paceline.data.loader import MicroBatch
from paceline.guard import snapshot
from paceline.models.loss_module import LossModule
from paceline.monitor.flops import FlopCount, count_on_fakes, peak_flops
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.train.pipeline_step import PipelineLossModule
from paceline.train.step import Stepper

Add = Callable[[MicroBatch], Tensor]

_log = logging.getLogger(__name__)


class ModelFlops:
    """`per_sample`: of the samples of this data rank, the part that this rank computes; None: not known (yet)."""

    def __init__(
        self,
        module: LossModule,
        stepper: Stepper,
        mesh: Mesh,
        draw: NoiseContext,
        code: Sequence[Any],
        *,
        eager: bool,
        countable: bool,
    ) -> None:
        """`eager`: nothing is compiled; `countable`: all of it runs in the main thread."""
        self._module, self._mesh = module, mesh
        # The recorder of a custom loop, which has these figures, may outlive its Trainer.
        self._stepper, self._draw = ref(stepper), ref(draw)
        self._code, self._compiles, self._countable = code, not eager, countable
        self.per_sample: float | None = None
        self.peak: float | None = None  # FLOP/s of this device

    def begin(self) -> None:
        """Count an eager model in the second of the following micro-batches: the first shows whether it is compiled."""
        self.per_sample = self.peak = None
        if self._countable and not _is_redundant(self._module, self._mesh):
            self._replace_add(self._add_first)

    def _replace_add(self, counted: Callable[[Add, MicroBatch], Tensor]) -> None:
        """For one call of `Stepper.add`, so that others cost nothing."""
        owner = self._stepper()
        assert owner is not None
        stepper, present = vars(owner), owner.add
        replaced = "add" in stepper

        def add(micro: MicroBatch) -> Tensor:
            if replaced:
                stepper["add"] = present
            else:
                del stepper["add"]
            return counted(present, micro)

        stepper["add"] = add

    def _add_first(self, add: Add, micro: MicroBatch) -> Tensor:
        before = _compiled_frames()
        loss = add(micro)
        is_compiled = any(part._compiled_call_impl is not None for part in self._module.modules())
        self._compiles |= is_compiled or _compiled_frames() > before
        if self._compiles:
            if not isinstance(self._module, PipelineLossModule):
                self._count_on_fakes(micro)
        elif not _compiled_frames():  # otherwise a function in it may have been compiled before
            self._replace_add(self._add_counted)
        return loss

    def _add_counted(self, add: Add, micro: MicroBatch) -> Tensor:
        with ExitStack() as counting:
            count = counting.enter_context(FlopCount())
            loss = self._add_within(counting, count, add, micro)
        self._take(count, micro.samples)
        return loss

    def _count_on_fakes(self, micro: MicroBatch) -> None:
        """In the first step, which compiles, because restoring a model waits for the GPU."""
        draw = self._draw()
        assert draw is not None
        try:
            with snapshot.preserved(self._module, *self._code), draw.uninstalled():
                count = count_on_fakes(self._module, micro.batch)
            self._take(count, micro.samples)
        except Exception as error:  # a forward that depends on values
            _log.debug("FLOPs are not known: %r", error)

    def _add_within(self, counting: ExitStack, count: FlopCount, add: Add, micro: MicroBatch) -> Tensor:
        """End the count before a backward that would have other bits in it."""
        owner = self._stepper()
        assert owner is not None
        stepper, backward = vars(owner), owner.backward
        replaced = "backward" in stepper

        def run_backward(*arguments: Any) -> Tensor:
            if count.changes_backward:
                counting.close()
            return backward(*arguments)

        stepper["backward"] = run_backward
        try:
            return add(micro)
        finally:
            if replaced:
                stepper["backward"] = backward
            else:
                del stepper["backward"]

    def _take(self, count: FlopCount, samples: int) -> None:
        if count.uncounted:
            _log.debug("FLOPs are not known: no formula for %s", ", ".join(sorted(count.uncounted)))
        elif count.total and samples:
            self.per_sample = count.total / samples
            device = self._mesh.device
            if device.type == "cuda" and count.matmul_precision is not None:
                self.peak = peak_flops(torch.cuda.get_device_name(device), count.matmul_precision)


def _compiled_frames() -> int:
    """Frames that torch.compile has seen in this process."""
    return sum(counters["frames"].values())


def _is_redundant(module: LossModule, mesh: Mesh) -> bool:
    """Whether tensor-parallel ranks compute the same products, which do not add up to those of the model."""
    if mesh.degrees.tensor == 1:
        return False
    weights = [
        parameter
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
        if parameter.dim() > 1
    ]
    return not all(isinstance(weight, DTensor) and _is_sharded(weight, "tensor") for weight in weights)


def _is_sharded(weight: DTensor, axis: str) -> bool:
    names = weight.device_mesh.mesh_dim_names or (axis,)
    return any(place.is_shard() for name, place in zip(names, weight.placements, strict=True) if name == axis)
