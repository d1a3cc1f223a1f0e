"""The loss module of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.models.loss_module import LossModule
from paceline.models.model_call import ModelCall, choose_outputs, read_loss
from paceline.models.spec import PipelineSpec
from paceline.parallel.model_parts import ForwardContext, ModelParts, PassContext
from paceline.parallel.pipeline.schedule_runner import PipelineRunner, build_stages
from paceline.parallel.pipeline.stage_partition import StagePartition
from paceline.parallel.tensor.apply import full_logits


def build_pipeline(
    parts: ModelParts, partition: StagePartition, context: PassContext, around: ForwardContext | None
) -> PipelineLossModule:
    """The stages of this rank, and the module that the remaining passes are applied to."""
    mesh = context.mesh
    stages = build_stages(parts.model, partition, mesh.coords["pipeline"], around)
    parts.runner = PipelineRunner(stages, partition, mesh, context.config.pipeline)
    parts.runner.note_blocks(parts.all_blocks)
    return PipelineLossModule(parts.model, around, parts.runner, partition.sequence.spec)


class PipelineLossModule(LossModule):
    """The loss module of a pipeline. Calling it runs a batch through all stages, without gradients, and applies the
    loss (or `function`) to the outputs on the last stage; other ranks return None."""

    can_repeat = False

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
        self._select_inputs: ModelCall | None = None

    def forward(self, batch: Any, function: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        with torch.no_grad():
            outputs = self.pipeline.forward(self.inputs_of(batch))
        if function is not None:
            return None if outputs is None else self.result_of(outputs, batch, function)
        if outputs is None:
            return None, None
        assert self.call is not None
        value, weight, self.metrics = read_loss(self.result_of(outputs, batch, self.call.loss))
        return value, weight

    def inputs_of(self, batch: Any) -> Tensor:
        """The input of the first stage: the argument of the model, without targets."""
        if self._spec is not None and isinstance(batch, dict):
            batch = {key: value for key, value in batch.items() if key != self._spec.targets}
        if self._select_inputs is None:
            self._select_inputs = choose_outputs(self.model, batch)
        inputs = self._select_inputs(_only_argument, batch)
        if not isinstance(inputs, Tensor):
            raise LayoutError(
                "pipeline-inputs", f"A pipeline requires one input tensor, got a {type(inputs).__name__}."
            )
        return inputs

    def result_of(self, outputs: Any, batch: Any, call: ModelCall) -> Any:
        """Return `call(model, batch)` for a model with these outputs."""

        def model(*arguments: Any, **named: Any) -> Any:
            targets = arguments[1] if len(arguments) > 1 else named.get(self._spec.targets) if self._spec else None
            if self._spec is None or targets is None:
                return full_logits(outputs)
            return getattr(self.model, self._spec.loss)(outputs, targets)

        with self.context or nullcontext():
            return call(model, batch)


def _only_argument(*arguments: Any, **named: Any) -> Any:
    values = [*arguments, *named.values()]
    return values[0] if len(values) == 1 else values
