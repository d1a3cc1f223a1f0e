"""The FLOPs that this rank computes per sample, counted once per call of `train()`.

An eager model is counted while it runs its second micro-batch, for the price of some Python calls. By then it is known
whether anything is compiled: torch.compile runs eagerly inside a dispatch mode, with other rounding and more memory, so
a compiled model is counted on fake tensors instead, uncompiled, which computes nothing. A model that cannot be counted
has no figures: wrong ones would be worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from paceline.data.batches import apply
from paceline.data.loader import MicroBatch
from paceline.guard import snapshot
from paceline.models.loss_module import LossModule
from paceline.monitor.flops import FlopCount
from paceline.plan.device_peaks import peak_flops
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.train.pipeline_step import PipelineLossModule
from paceline.train.step import Stepper

Add = Callable[[MicroBatch], Tensor]

_log = logging.getLogger(__name__)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
        self._module, self._stepper, self._mesh, self._draw = module, stepper, mesh, draw
        self._code, self._eager, self._countable = code, eager, countable
        self.per_sample: float | None = None
        self.peak: float | None = None  # FLOP/s of this device

    def begin(self) -> None:
        """Count in the second of the following micro-batches: the first one compiles."""
        self.per_sample = self.peak = None
        if self._countable and not _is_redundant(self._module, self._mesh):
            self._replace_add(self._add_first)

    def _replace_add(self, counted: Callable[[Add, MicroBatch], Tensor]) -> None:
        """For one call of `Stepper.add`, so that others cost nothing."""
        stepper, present = vars(self._stepper), self._stepper.add
        replaced = "add" in stepper

        def add(micro: MicroBatch) -> Tensor:
            if replaced:
                stepper["add"] = present
            else:
                del stepper["add"]
            return counted(present, micro)

        stepper["add"] = add

    def _add_first(self, add: Add, micro: MicroBatch) -> Tensor:
        loss = add(micro)
        self._replace_add(self._add_counted)
        return loss

    def _add_counted(self, add: Add, micro: MicroBatch) -> Tensor:
        if self._eager and not counters["frames"]:
            with FlopCount() as count:
                loss = add(micro)
            self._take(count, micro.samples)
            return loss
        if not isinstance(self._module, PipelineLossModule):
            self._count_on_fakes(micro)
        return add(micro)

    def _take(self, count: FlopCount, samples: int) -> None:
        if count.uncounted:
            _log.debug("FLOPs are not known: no formula for %s", ", ".join(sorted(count.uncounted)))
        elif count.total and samples:
            self.per_sample = count.total / samples
            device = self._mesh.device
            if device.type == "cuda" and count.matmul_precision is not None:
                self.peak = peak_flops(torch.cuda.get_device_name(device), count.matmul_precision)

    def _count_on_fakes(self, micro: MicroBatch) -> None:
        """Run the uncompiled model on tensors without data. Restores what its forward changes."""
        module = self._module
        try:
            with (
                snapshot.preserved(module, *self._code),
                torch.compiler.set_stance("force_eager"),
                self._draw.uninstalled(),
                _without_hooks(module),
                FakeTensorMode(allow_non_fake_inputs=True) as fake,
            ):
                for part in module.modules():
                    if isinstance(part, _NormBase):
                        part.training = False  # synchronized ones would communicate
                module.weighs = False
                batch = apply(micro.batch, fake.from_tensor)
                with FlopCount() as count:
                    value, _ = functional_call(module, _like_parameters(module), (batch,))
                    value.backward()
            self._take(count, micro.samples)
        except Exception as error:  # a forward that depends on values
            _log.debug("FLOPs are not known: %r", error)


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


def _like_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Full tensors without data, for parameters that may be sharded."""
    return {
        name: torch.empty(p.shape, dtype=p.dtype, device=p.device, requires_grad=p.requires_grad)
        for name, p in module.named_parameters()
    } | dict(module.named_buffers())


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """In which FSDP gathers parameters, and ranks compare the order of modules."""
    kept = [(hooks, dict(hooks)) for part in module.modules() for name in _HOOKS if (hooks := getattr(part, name))]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, members in kept:
            hooks.update(members)
