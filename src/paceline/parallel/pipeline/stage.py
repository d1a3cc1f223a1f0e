"""A pipeline stage: consecutive layers of the model, including its code before the first and after the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import LayoutError
from paceline.models.weights import PowerIterations
from paceline.parallel.pipeline.stage_partition import LayerSequence, StagePartition
from paceline.runtime import noise


class Stage(nn.Module):
    """Maps the output of the previous stage to the input of the next one. Shares its layers with the model."""

    def __init__(
        self,
        model: nn.Module,
        sequence: LayerSequence,
        keys: Sequence[str],
        *,
        first: bool,
        last: bool,
        context: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__()
        self.blocks = sequence.layers(model, keys)
        self.is_first, self.is_last = first, last
        spec = sequence.spec
        self._before = getattr(model, spec.first) if spec and first else None
        self._after = getattr(model, spec.last) if spec and last else None
        self._context = context
        self.chunk: int | None = None  # the next micro-batch of a step; None: another forward
        self.rows = 0  # of the input of a micro-batch; hidden states may have other dims first
        self.previous: str | None = None  # the last block of the stage before
        for key, block in zip(keys, self.blocks, strict=True):
            self.add_module(f"layer {key}", block)  # FSDP looks for parameters in submodules
        for name in (*(sequence.first_modules if first else ()), *(sequence.last_modules if last else ())):
            self.add_module(name.replace(".", " "), model.get_submodule(name))
        power = PowerIterations(self)
        if power:  # only in the first micro-batch: the step allows them again
            self.register_forward_hook(lambda *call: power.allow(False))

    def forward(self, hidden: Tensor) -> Any:
        if not self.is_first and hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(Tensor.contiguous)  # point-to-point communication needs contiguous gradients
        with self._context or nullcontext(), self._samples(len(hidden)):
            if self._before is not None:
                hidden = self._before(hidden)
            for block in self.blocks:
                hidden = block(hidden)
            if self._after is not None:
                hidden = self._after(hidden)
        return hidden if self.is_last else _to_send(hidden)

    def _samples(self, rows: int) -> AbstractContextManager[Any]:
        """Noise and dropout are those of the samples in this micro-batch."""
        draw = noise.current()
        if draw is None or draw.samples is None:
            return nullcontext()
        if self.chunk is None:
            return draw.select(0, rows, self.previous)
        self.chunk += 1
        return draw.select((self.chunk - 1) * self.rows, self.rows, self.previous)


def _to_send(hidden: Any) -> Tensor:
    if isinstance(hidden, DTensor):
        hidden = hidden.to_local()
    if not isinstance(hidden, Tensor):
        raise LayoutError(
            "stage-output",
            f"The last layer of a stage must return a tensor, got {type(hidden).__name__}.",
            why="stages exchange a single tensor",
            fix="change pipeline.balance, or let the layer return a tensor",
        )
    return hidden.contiguous()


def build_stages(
    model: nn.Module, partition: StagePartition, rank: int, context: AbstractContextManager[Any] | None = None
) -> list[Stage]:
    """The stages of this rank, built from the current layers of the model."""
    last = len(partition.stages) - 1
    return [
        Stage(
            model, partition.sequence, partition.stages[number], first=number == 0, last=number == last, context=context
        )
        for number in partition.stages_on(rank)
    ]
