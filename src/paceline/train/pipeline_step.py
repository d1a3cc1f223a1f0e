"""A step of a pipelined model: the same sums and weights as on one rank, noted by the last stage.

A data rank's samples go through the pipeline in micro-batches of one length. The last stage looks at the real rows of
each, so padding weighs nothing, whatever kind of loss it is. Other stages note nothing: in sums over all ranks each
sample counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config.sections import PipelineSection as Settings
from paceline.data.batches import rows_of
from paceline.data.loader import MicroBatch
from paceline.errors import LayoutError
from paceline.models.spec import PipelineSpec
from paceline.parallel.compose import Subject
from paceline.parallel.pipeline.schedule_runner import PipelineRunner
from paceline.parallel.tensor.apply import full_logits
from paceline.plan.pipeline_schedule import choose_microbatches
from paceline.runtime import collectives
from paceline.train.model_call import ModelCall, choose_outputs, read_loss
from paceline.train.step import LossModule, Stepper


class PipelineLossModule(LossModule):
    """The step's module where no rank holds the whole model: calling it sends a batch through all stages, without
    gradients. What a function would make of the model and the batch, it makes of the outputs; on other ranks than the
    last stage's there are none, and None comes back."""

    def __init__(
        self,
        model: nn.Module,
        context: AbstractContextManager[Any] | None,
        pipeline: PipelineRunner,
        spec: PipelineSpec | None,
    ) -> None:
        super().__init__(model, context)
        self.pipeline, self._spec = pipeline, spec
        self.stages = nn.ModuleList(pipeline.stages)
        self._pick: ModelCall | None = None

    def forward(self, batch: Any, function: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        with torch.no_grad():
            outputs = self.pipeline.forward(self.inputs_of(batch))
        if function is not None:
            return None if outputs is None else self.made_of(outputs, batch, function)
        if outputs is None:
            return None, None
        assert self.call is not None
        value, weight, self.metrics = read_loss(self.made_of(outputs, batch, self.call.loss))
        return value, weight

    def inputs_of(self, batch: Any) -> Tensor:
        """What goes into the first stage: what the model would be called with, without the targets."""
        if self._pick is None:
            self._pick = choose_outputs(self.model, batch)
        inputs = self._pick(_only_argument, batch)
        if not isinstance(inputs, Tensor):
            raise LayoutError(
                "pipeline-inputs",
                f"The model takes a {type(inputs).__name__} of inputs, but a pipeline takes one tensor.",
                why="micro-batches are cut from it by rows",
                fix="give batches of (input, target), or a dict with one input; or use strategy: fsdp",
            )
        return inputs

    def made_of(self, outputs: Any, batch: Any, call: ModelCall) -> Any:
        """What `call` makes of a model that gives these outputs for this batch."""

        def model(*arguments: Any, **named: Any) -> Any:
            targets = arguments[1] if len(arguments) > 1 else named.get(self._spec.targets) if self._spec else None
            if self._spec is None or targets is None:
                return full_logits(outputs)
            return getattr(self.model, self._spec.loss)(outputs, targets)

        with self.context or nullcontext():
            return call(model, batch)


def build_loss_module(subject: Subject, context: AbstractContextManager[Any] | None) -> LossModule:
    """The module that the step's passes are applied to."""
    if subject.runner is None or subject.partition is None:
        return LossModule(subject.model, context)
    return PipelineLossModule(subject.model, context, subject.runner, subject.partition.sequence.spec)


def require_no_loss_fn(loss_fn: Callable[[Any, Any], Any] | None) -> None:
    if loss_fn is not None:
        raise LayoutError(
            "pipeline-and-loss-fn",
            "loss_fn(model, batch) was given, but no rank holds the whole model.",
            why="the last stage has the outputs and makes the loss from them",
            fix="give criterion=… for batches of (input, target), or a model whose PipelineSpec names its loss",
        )


def _only_argument(*arguments: Any, **named: Any) -> Any:
    values = [*arguments, *named.values()]
    return values[0] if len(values) == 1 else values


class PipelineStepper(Stepper):
    """A Stepper whose micro-batches are sliced once more, and go through the stages by a schedule."""

    def __init__(
        self, module: PipelineLossModule, *others: Any, settings: Settings, log: Callable[[str], None], **named: Any
    ) -> None:
        super().__init__(module, *others, **named)
        self._staged, self._pipeline, self._settings, self._log = module, module.pipeline, settings, log
        self._device = next(module.parameters()).device
        if self._scaler is not None:  # it begins with the first loss, which most stages never see
            self._scaler.scale(torch.zeros((), device=self._device))
        self._counts_samples: bool | None = None  # whether the loss is a mean; the last stage sees it
        self._seen: list[tuple[Tensor, Tensor | float]] = []

    def add(self, micro: MicroBatch) -> Tensor:
        """Forward and backward of one data rank's micro-batch. Its loss comes back, from the last stage."""
        held = nullcontext() if micro.last or self._no_sync is None else self._no_sync()
        with held:
            self._run(micro)
        self.means = bool(self._counts_samples)
        self.data_weighted |= not micro.exact or not self.means
        noted = self._note(micro)
        if micro.last:
            if self.data_weighted:
                self._start_weight_reduction(micro, self._device)
            self._pipeline.reduce_tied(self._gradient_of)
        return noted

    def run_zero_weight(self, micro: MicroBatch) -> Tensor | float | None:
        """A pass of weight zero; how much the micro-batch weighs, None: its samples."""
        self._run(micro, counts=False)
        weight = None if self._counts_samples or not self._seen else sum(weight for _, weight in self._seen)
        self._seen = []
        return weight

    def _run(self, micro: MicroBatch, counts: bool = True) -> None:
        inputs = self._staged.inputs_of(micro.batch)
        if self._counts_samples is None:
            self._choose_microbatches(len(inputs))
        self._seen, self._draw.samples, self._draw.draws = [], micro, 0
        self._pipeline.train(inputs, partial(self._loss, micro, len(inputs), counts))
        self._draw.samples = None
        if self._counts_samples is None:
            self._counts_samples = bool(self._pipeline.broadcast_from_last([float(self._last_is_mean)])[0])

    def _choose_microbatches(self, samples: int) -> None:
        """How many parts there are is the same for all ranks, whatever each of them has in the first batch."""
        self._last_is_mean = True
        most = max(collectives.all_gather_object(samples))
        count, description = choose_microbatches(self._settings, self._pipeline.ranks, most)
        self._pipeline.microbatches = count
        self._log(f"pipeline: {description}")

    def _loss(self, micro: MicroBatch, rows: int, counts: bool, outputs: Tensor, number: int) -> Tensor:
        """What the backward of one part starts from: its loss, times its share of the step."""
        length = len(outputs)
        start, stop = number * length, min(rows, (number + 1) * length)
        if stop <= start:
            nothing = outputs.sum() * 0.0
            return nothing.full_tensor() if isinstance(nothing, DTensor) else nothing
        assert self._module.call is not None
        part = rows_of(micro.batch, start, stop)
        value, weight, metrics = read_loss(self._staged.made_of(outputs[: stop - start], part, self._module.call.loss))
        self._last_is_mean = weight is None
        if weight is None:
            factor = self._ranks * (stop - start) / micro.step_samples
        else:
            factor = self._ranks / (self.nominal or micro.step_samples)
        weighs: Tensor | float = stop - start if weight is None else weight
        self._seen.append((value.detach(), weighs))
        if metrics is not None and counts:
            self.metrics.append((metrics, weighs if micro.samples else 0.0))
        return value * self._seed(factor if counts and micro.samples else 0.0, value)

    def _note(self, micro: MicroBatch) -> Tensor:
        """The parts of a micro-batch as one: a mean with its samples, or a sum with its weight."""
        if not self._seen:
            return torch.full((), torch.nan, device=self._device)
        weight: Any = sum(weight for _, weight in self._seen)
        if self.means:
            noted = sum(value * share for value, share in self._seen) / weight
            weight = micro.samples
        else:
            noted = sum(torch.where(torch.as_tensor(share) > 0, value, 0.0) for value, share in self._seen)
            weight = weight if micro.samples else 0.0
        assert isinstance(noted, Tensor)
        self._seen = []
        self.losses.append((noted, weight))
        if self._watch is not None:
            self._watch.check_loss(noted, micro.step)
        return noted

    def _gradient_of(self, name: str) -> Tensor | None:
        return self._module.model.get_parameter(name).grad

    def forward(self, micro: MicroBatch) -> Any:
        raise LayoutError(
            "pipeline-forward",
            "trainer.forward(batch) was called, but the model is cut into stages.",
            why="forward and backward of its micro-batches take turns, in an order that is the schedule's",
            fix="use trainer.training_step(batch), or another layout",
        )
