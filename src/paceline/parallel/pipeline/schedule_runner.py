"""Runs the stages of a pipeline: torch's schedules for training, stage after stage for everything else.

All ranks of a pipeline read the same samples, sliced into micro-batches. torch's schedules need micro-batches of equal
size, so the last one is padded by repeating a row, which the loss ignores. Stages exchange a single tensor, whose shape
is inferred by a forward without gradients.

A stage has consecutive layers of the model, including its code before the first and after the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor

from paceline.config.sections import PipelineSection as Settings
from paceline.errors import LayoutError
from paceline.models.weights import PowerIterations
from paceline.parallel.fsdp import reshard_all
from paceline.parallel.pipeline.stage_partition import LayerSequence, StagePartition
from paceline.parallel.shards import local_shard
from paceline.runtime import noise
from paceline.runtime.mesh import Mesh
from paceline.runtime.rng import preserve_rng_state

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 10  # length of the header sent before a tensor: dtype, number of dims, shape

LossOf = Callable[[Tensor, int], Tensor]  # takes the outputs of a micro-batch and its index


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
            hidden.register_hook(_contiguous)
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
            "stage-output", f"The last layer of a stage must return a tensor, got {type(hidden).__name__}."
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


class SampleMeta(NamedTuple):
    """Shape, without the batch dim, and dtype of an input or output of a stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, rows: int) -> Tensor:
        return torch.empty((rows, *self.shape), dtype=self.dtype, device="meta", requires_grad=self.dtype in _DTYPES)


class PipelineRunner:
    """The stages of this rank, and how to run them."""

    def __init__(self, stages: Sequence[Stage], partition: StagePartition, mesh: Mesh, settings: Settings) -> None:
        axis = mesh.axis("pipeline")
        assert axis is not None
        self.stages, self.tied, self._partition = list(stages), partition.tied, partition
        self._group, self._device = axis.get_group(), mesh.device
        self.rank, self.ranks, self._total = mesh.coords["pipeline"], partition.ranks, len(partition.stages)
        self._alone = mesh.data_ranks == mesh.local_replicas
        self._settings = settings
        self.microbatches = settings.microbatches or 2 * partition.ranks  # until the first batch is known
        self._metas: dict[int, tuple[SampleMeta, SampleMeta]] = {}  # input and output of each stage
        self._inferred_from: SampleMeta | None = None
        self._rows = 0
        self._schedule: Any = None
        self._loss: LossOf | None = None

    def note_blocks(self, names: Sequence[str]) -> None:
        """Tell each stage the last of these blocks in the stages before it."""
        for number, stage in self._numbered():
            stage.previous = self._partition.last_block_before(number, names)

    @property
    def is_last(self) -> bool:
        return self.stages[-1].is_last

    def _numbered(self) -> list[tuple[int, Stage]]:
        return [(self.rank + place * self.ranks, stage) for place, stage in enumerate(self.stages)]

    def train(self, inputs: Tensor, loss: LossOf) -> None:
        """Forward and backward of all micro-batches. Gradients are accumulated, and averaged over the data ranks."""
        self._loss = loss
        rows = -(-len(inputs) // self.microbatches)
        self._prepare(inputs, max(rows, self._rows))
        arguments = (_pad(inputs, self.microbatches * self._rows),) if self.rank == 0 else ()
        for stage in self.stages:
            stage.chunk, stage.rows = 0, self._rows
        # Pass the index of each micro-batch as its target: the loss looks up the targets by index.
        targets = torch.arange(self.microbatches) if self.is_last else None
        self._schedule.step(*arguments, target=targets, return_outputs=False)
        for stage in self.stages:
            stage.chunk = None
        self._loss = None

    def _prepare(self, inputs: Tensor, rows: int) -> None:
        meta = _meta_of(inputs)
        if self._inferred_from != meta:
            if self._inferred_from is not None and not self._alone:
                raise LayoutError(
                    "pipeline-shape",
                    f"The shape of the samples changed from {self._inferred_from.shape} to {meta.shape}.",
                )
            self._infer_shapes(inputs)
            self._inferred_from = meta
        elif rows == self._rows:
            return
        self._rows = rows
        self._schedule = self._build(rows)

    def _infer_shapes(self, inputs: Tensor) -> None:
        buffers = [(buffer, buffer.clone()) for stage in self.stages for buffer in stage.buffers()]
        with preserve_rng_state(), torch.no_grad():
            self.forward(inputs[: self.microbatches], record_shapes=True)
            for buffer, before in buffers:
                buffer.copy_(before)
        for stage in self.stages:
            reshard_all(stage)

    def _build(self, rows: int) -> Any:
        built = []
        for number, stage in self._numbered():
            input_meta, output_meta = self._metas[number]
            shapes: dict[str, Any] = {"input_args": input_meta.empty(rows), "output_args": output_meta.empty(rows)}
            built.append(
                pipelining.PipelineStage(stage, number, self._total, self._device, group=self._group, **shapes)
            )
        schedule = SCHEDULES[self._settings.schedule]
        single = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
        return schedule(built[0] if single else built, self.microbatches, loss_fn=self._loss_of, scale_grads=False)

    def _loss_of(self, outputs: Tensor, number: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(outputs, int(number))

    def forward(self, inputs: Tensor, record_shapes: bool = False) -> Any:
        """Outputs on the last stage, None elsewhere. Runs micro-batches one after the other, without padding. Shapes
        are not recorded in evaluation, where they may differ from training."""
        rows = -(-len(inputs) // self.microbatches)
        outputs, sent = [], []
        for part in inputs.split(rows):
            for number, stage in self._numbered():
                received = part if stage.is_first else self._receive(number)
                result = stage(received)
                if record_shapes:
                    self._metas[number] = _meta_of(received), _meta_of(result)
                if stage.is_last:
                    outputs.append(result)
                else:
                    sent.append(self._send(result, number))
        for works, _ in sent:
            for work in works:
                work.wait()
        return torch.cat(outputs) if outputs else None

    def _send(self, tensor: Tensor, number: int) -> tuple[list[Any], list[Tensor]]:
        """Send a header and the tensor to the next stage. The caller must keep both alive until they have been sent."""
        numbers = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device=self._device)
        peer = (number + 1) % self.ranks
        works = [torch_dist.isend(part, group=self._group, group_dst=peer) for part in (header, tensor.detach())]
        return works, [header, tensor]

    def _receive(self, number: int) -> Tensor:
        peer = (number - 1) % self.ranks
        header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
        torch_dist.recv(header, group=self._group, group_src=peer)
        dtype, dims, *shape = header.tolist()
        tensor = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self._device)
        torch_dist.recv(tensor, group=self._group, group_src=peer)
        return tensor

    def broadcast_from_last(self, numbers: Sequence[float]) -> list[float]:
        """Broadcast numbers from the last stage to every rank of the pipeline."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        torch_dist.broadcast(tensor, group=self._group, group_src=self.ranks - 1)
        return tensor.tolist()

    @torch.no_grad()
    def broadcast_tied(self, tensors: Callable[[str], Tensor | None]) -> None:
        """Copy the original of each tied parameter to its copies. `tensors` looks tensors up by name."""
        for own, first, others in self._held(tensors):
            if self.rank == first:
                for rank in others:
                    torch_dist.send(own, group=self._group, group_dst=rank)
            else:
                torch_dist.recv(own, group=self._group, group_src=first)

    @torch.no_grad()
    def reduce_tied(self, tensors: Callable[[str], Tensor | None]) -> None:
        """All-reduce (sum) over the copies of each tied parameter: used for their gradients."""
        for own, first, others in self._held(tensors):
            if self.rank == first:
                for rank in others:
                    received = torch.empty_like(own)
                    torch_dist.recv(received, group=self._group, group_src=rank)
                    own += received
            else:
                torch_dist.send(own, group=self._group, group_dst=first)
        self.broadcast_tied(tensors)

    def _held(self, tensors: Callable[[str], Tensor | None]) -> Iterator[tuple[Tensor, int, list[int]]]:
        """This rank's copies of tied parameters, each with the rank of the original and those of all other copies."""
        for tied in self.tied:
            name = tied.holders.get(self.rank)
            if name is not None and (tensor := tensors(name)) is not None:
                first, *others = tied.holders
                yield local_shard(tensor), first, others


def _pad(inputs: Tensor, rows: int) -> Tensor:
    """Pad to `rows` rows by repeating the last one."""
    missing = rows - len(inputs)
    return inputs if not missing else torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])])


def _meta_of(tensor: Any) -> SampleMeta:
    return SampleMeta(tuple(tensor.shape[1:]), tensor.dtype)


def _contiguous(gradient: Tensor) -> Tensor:
    """Point-to-point communication needs it. A hook with a module of its own: methods of torch have none, by which the
    check for hooks of the user recognizes libraries."""
    return gradient.contiguous()
