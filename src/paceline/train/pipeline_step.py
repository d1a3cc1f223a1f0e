"""The step of a pipeline-parallel model: the same sums and weights as on one rank, collected by the last stage.

The samples of a data rank are split into micro-batches of equal length. The last stage computes the loss on their real
rows only, so padding has no weight. Other stages collect nothing: in sums over all ranks each sample counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.config.sections import PipelineSection as Settings
from paceline.data.batches import rows_of
from paceline.data.loader import MicroBatch
from paceline.errors import LayoutError
from paceline.models.divisor import Divisor
from paceline.models.loss_module import LossModule
from paceline.models.model_call import read_loss
from paceline.parallel.pipeline.pipeline_loss import PipelineLossModule
from paceline.plan.partition import choose_microbatches
from paceline.precision.policies import Scaler
from paceline.run.heartbeat import counters
from paceline.runtime import collectives
from paceline.train.loss_weights import Weight
from paceline.train.train_step import TrainStep


class PipelineStep(TrainStep):
    """A TrainStep that splits its micro-batches further and runs them through the stages by a schedule."""

    def __init__(
        self, settings: Settings, log: Callable[[str], None], scaler: Scaler, module: LossModule, *parts: Any
    ) -> None:
        assert isinstance(module, PipelineLossModule)
        super().__init__(module, *parts)
        self._loss_module, self._pipeline, self._settings, self._log = module, module.pipeline, settings, log
        self._device = next(module.parameters()).device
        if scaler.is_enabled():  # it initializes with the first loss, which only the last stage has
            scaler.scale(torch.zeros((), device=self._device))
        self._counts_samples: bool | None = None  # whether the loss is a mean; known on the last stage first
        self._last_is_mean, self._divides = True, False
        self._parts: list[tuple[Tensor, Tensor | float]] = []

    def add(self, micro: MicroBatch) -> Tensor:
        """Run forward and backward of a micro-batch. Returns its loss on the last stage."""
        weights, hooks = self.weights, self.hooks
        for hook in hooks.before_micro:
            hook(micro)
        for before in hooks.before_forward:
            before(not micro.group)
        counters.micros += 1
        weights.count(micro)
        with nullcontext() if micro.last or self._no_sync is None else self._no_sync():
            self._run(micro)
        weights.means = bool(self._counts_samples)
        weights.data_weighted |= not micro.exact or not weights.means
        if self._divides:
            weights.divide_means(micro)
        loss = self._collect(micro)
        if micro.last:
            if weights.data_weighted:
                weights.start_reduction(micro, self._device)
            self._pipeline.reduce_tied(lambda name: self._module.model.get_parameter(name).grad)
        for done in hooks.after_backward:
            done(micro)
        return loss

    def run_zero_weight(self, micro: MicroBatch) -> Tensor | float | None:
        """Run a micro-batch with weight zero. Returns the weight it would have; None: its samples."""
        self._run(micro, counts=False)
        weight = None if self._counts_samples or not self._parts else sum(weight for _, weight in self._parts)
        self._parts = []
        return weight

    def _run(self, micro: MicroBatch, counts: bool = True) -> None:
        inputs = self._loss_module.inputs_of(micro.batch)
        if self._counts_samples is None:
            self._choose_microbatches(len(inputs))
        self._parts = []
        self.draw.begin(micro)
        self._pipeline.train(inputs, partial(self._loss, micro, len(inputs), counts))
        self.draw.end()
        if counts:
            self.draw.look(micro)
        if self._counts_samples is None:
            kinds = [float(self._last_is_mean), float(self._divides)]
            self._counts_samples, self._divides = map(bool, self._pipeline.broadcast_from_last(kinds))

    def _choose_microbatches(self, samples: int) -> None:
        """Choose the number of micro-batches equally on all ranks, from the largest first batch."""
        most = max(collectives.all_gather_object(samples))
        count, description = choose_microbatches(self._settings, self._pipeline.ranks, most)
        self._pipeline.microbatches = count
        self._log(f"pipeline: {description}")

    def _loss(self, micro: MicroBatch, rows: int, counts: bool, outputs: Tensor, number: int) -> Tensor:
        """The value that the backward of one part starts from: its loss, times its share of the step."""
        length = len(outputs)
        start, stop = number * length, min(rows, (number + 1) * length)
        if stop <= start:
            nothing = outputs.sum() * 0.0
            return nothing.full_tensor() if isinstance(nothing, DTensor) else nothing
        assert self._module.call is not None
        part = rows_of(micro.batch, start, stop)
        value, weight, metrics = read_loss(
            self._loss_module.result_of(outputs[: stop - start], part, self._module.call.loss)
        )
        self.weights.note_kind(sums=weight is not None)
        divided: Weight = self._loss_module.divisor(value) if weight is None else weight
        self._last_is_mean, self._divides = divided is None, isinstance(divided, Divisor)
        kept, kept_weight, seed = self.weights.share(micro, stop - start, value, divided)
        self._parts.append((kept, kept_weight))
        if metrics is not None and counts:
            self.weights.metrics.append((metrics, kept_weight if micro.samples else 0.0))
        return value * (seed if counts and micro.samples else torch.zeros_like(seed))

    def _collect(self, micro: MicroBatch) -> Tensor:
        """Combine the parts of a micro-batch: a mean with its samples, or a sum with its weight."""
        if not self._parts:
            return torch.full((), torch.nan, device=self._device)
        weight: Any = sum(weight for _, weight in self._parts)
        if self.weights.means:
            loss = sum(value * share for value, share in self._parts) / weight
            weight = micro.samples
        else:
            loss = sum(torch.where(torch.as_tensor(share) > 0, value, 0.0) for value, share in self._parts)
            weight = weight if micro.samples else 0.0
        assert isinstance(loss, Tensor)
        self._parts = []
        self.weights.losses.append((loss, weight))
        return loss

    def forward(self, micro: MicroBatch) -> Any:
        raise LayoutError("pipeline-forward", "trainer.forward(batch) is not supported by a pipeline.")
