"""Running the stages of a pipeline: torch's schedules for training, a plain relay for everything else.

Every rank of a pipeline reads the same samples. They are sliced into micro-batches of one length, the last one padded
by repeating a row, as torch's schedules need; the loss looks at the real rows only. Between stages goes one tensor,
whose shape (but for the rows) is learnt from a first pass without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import pipelining

from paceline.config.sections import PipelineSection as Settings
from paceline.errors import LayoutError
from paceline.parallel.fsdp import reshard_all
from paceline.parallel.pipeline.stage import Stage
from paceline.parallel.pipeline.stage_partition import StagePartition, TiedParameter
from paceline.parallel.shards import local_shard
from paceline.runtime.mesh import Mesh
from paceline.runtime.rng import preserve_rng_state

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 10  # numbers that announce a tensor: its dtype, its dims, their sizes

LossOf = Callable[[Tensor, int], Tensor]  # from a micro-batch's outputs and its number


class Kind(NamedTuple):
    """What goes in and out of a stage, without the rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def like(self, rows: int) -> Tensor:
        return torch.empty((rows, *self.shape), dtype=self.dtype, device="meta", requires_grad=self.dtype in _DTYPES)


class PipelineRunner:
    """This rank's stages and how they are run."""

    def __init__(self, stages: Sequence[Stage], partition: StagePartition, mesh: Mesh, settings: Settings) -> None:
        axis = mesh.axis("pipeline")
        assert axis is not None
        self.stages, self.tied = list(stages), partition.tied
        self._group, self._device = axis.get_group(), mesh.device
        self.rank, self.ranks, self._total = mesh.coords["pipeline"], partition.ranks, len(partition.stages)
        self._alone = mesh.data_ranks == 1
        self._settings = settings
        self.microbatches = settings.microbatches or 2 * partition.ranks  # until the first batch is seen
        self._kinds: dict[int, tuple[Kind, Kind]] = {}
        self._entering: Kind | None = None  # what the kinds were learnt from
        self._rows = 0
        self._schedule: Any = None
        self._loss: LossOf | None = None

    @property
    def is_last(self) -> bool:
        return self.stages[-1].is_last

    def _numbered(self) -> list[tuple[int, Stage]]:
        return [(self.rank + place * self.ranks, stage) for place, stage in enumerate(self.stages)]

    def train(self, inputs: Tensor, loss: LossOf) -> None:
        """Forward and backward of all micro-batches; gradients are added up, and averaged over the data ranks."""
        self._loss = loss
        rows = -(-len(inputs) // self.microbatches)
        self._prepare(inputs, max(rows, self._rows))
        arguments = (padded(inputs, self.microbatches * self._rows),) if self.rank == 0 else ()
        # In place of targets the number of each micro-batch: the loss knows where its rows are.
        targets = torch.arange(self.microbatches) if self.is_last else None
        self._schedule.step(*arguments, target=targets, return_outputs=False)
        self._loss = None

    def _prepare(self, inputs: Tensor, rows: int) -> None:
        entering = Kind(tuple(inputs.shape[1:]), inputs.dtype)
        if self._entering != entering:
            if self._entering is not None and not self._alone:
                raise LayoutError(
                    "pipeline-shape",
                    f"Samples of shape {self._entering.shape} are followed by ones of {entering.shape}.",
                    why="between stages tensors have one shape, and ranks that share weights learn it at the same time",
                    fix="pad the samples to one shape, or use a pipeline without replicate and shard",
                )
            self._learn(inputs)
            self._entering = entering
        elif rows == self._rows:
            return
        self._rows = rows
        self._schedule = self._build(rows)

    def _learn(self, inputs: Tensor) -> None:
        with preserve_rng_state(), torch.no_grad():
            self.forward(inputs[: self.microbatches], learning=True)
        for stage in self.stages:
            reshard_all(stage)

    def _build(self, rows: int) -> Any:
        built = []
        for number, stage in self._numbered():
            entering, leaving = self._kinds[number]
            built.append(
                pipelining.PipelineStage(
                    stage,
                    number,
                    self._total,
                    self._device,
                    input_args=entering.like(rows),
                    output_args=leaving.like(rows),
                    group=self._group,
                )
            )
        kind = SCHEDULES[self._settings.schedule]
        single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        return kind(built[0] if single else built, self.microbatches, loss_fn=self._loss_of, scale_grads=False)

    def _loss_of(self, outputs: Tensor, number: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(outputs, int(number))

    def forward(self, inputs: Tensor, learning: bool = False) -> Any:
        """The outputs, on the last stage; None elsewhere. Micro-batches follow each other without padding. Only a pass
        that is there to learn them may note shapes: an evaluation's can be others than training's."""
        rows = -(-len(inputs) // self.microbatches)
        outputs, sent = [], []
        for part in inputs.split(rows):
            for number, stage in self._numbered():
                entering = part if stage.is_first else self._receive(number)
                leaving = stage(entering)
                if learning:
                    self._kinds[number] = _kind_of(entering), _kind_of(leaving)
                if stage.is_last:
                    outputs.append(leaving)
                else:
                    sent.append(self._send(leaving, number))
        for works, _ in sent:
            for work in works:
                work.wait()
        return torch.cat(outputs) if outputs else None

    def _send(self, tensor: Tensor, number: int) -> tuple[list[Any], list[Tensor]]:
        """To the next stage, announced by its dtype and shape. The tensors are kept until they have arrived."""
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

    def from_last(self, numbers: Sequence[float]) -> list[float]:
        """The last stage's numbers, on every rank of the pipeline."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        torch_dist.broadcast(tensor, group=self._group, group_src=self.ranks - 1)
        return tensor.tolist()

    @torch.no_grad()
    def broadcast_tied(self, tensors: Callable[[str], Tensor | None]) -> None:
        """Every copy of a tied parameter takes the original's values. `tensors` finds them by name."""
        for tied, own in self._held(tensors):
            first, *others = tied.holders
            if self.rank == first:
                for rank in others:
                    torch_dist.send(own, group=self._group, group_dst=rank)
            else:
                torch_dist.recv(own, group=self._group, group_src=first)

    @torch.no_grad()
    def reduce_tied(self, tensors: Callable[[str], Tensor | None]) -> None:
        """The sum over all copies, for each of them: gradients of tied parameters."""
        for tied, own in self._held(tensors):
            first, *others = tied.holders
            if self.rank == first:
                for rank in others:
                    theirs = torch.empty_like(own)
                    torch_dist.recv(theirs, group=self._group, group_src=rank)
                    own += theirs
            else:
                torch_dist.send(own, group=self._group, group_dst=first)
        self.broadcast_tied(tensors)

    def _held(self, tensors: Callable[[str], Tensor | None]) -> list[tuple[TiedParameter, Tensor]]:
        held = []
        for tied in self.tied:
            name = tied.holders.get(self.rank)
            tensor = None if name is None else tensors(name)
            if tensor is not None:
                held.append((tied, local_shard(tensor)))
        return held


def padded(inputs: Tensor, rows: int) -> Tensor:
    """The last row again and again, up to that many."""
    missing = rows - len(inputs)
    return inputs if not missing else torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])])


def _kind_of(tensor: Any) -> Kind:
    return Kind(tuple(tensor.shape[1:]), tensor.dtype)
