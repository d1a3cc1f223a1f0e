"""Before the first step: do the ranks mean the same thing?

One micro-step of weight zero, after which buffers and random state are as they were. It settles DDP's buckets (which
are rebuilt after the first backward: sums would else run in another order after a resume), finds parameters that the
loss does not use, warms what compiles, and tells how much a micro-batch weighs. Then the ranks compare notes: library
versions, weights, data. A difference is an error that names the ranks.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log2
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.data.batches import digest, samples_in, tensors_in
from paceline.data.loader import MicroBatch
from paceline.errors import DataError, LayoutError, TrainError
from paceline.parallel.compose import Wrapped
from paceline.runtime import collectives, consistency
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.runtime.rng import preserve_rng_state
from paceline.train.step import LossModule

_SHOWN = 8
_ROWS_COMPARED = 64
_ROWS_NEEDED = 4
_ROUNDING = 1e-3  # half precision differs between ranks by less, a wrong plan by more


def check(
    module: LossModule,
    wrapped: Wrapped,
    micro: MicroBatch,
    mesh: Mesh,
    draw: NoiseContext,
    *,
    fingerprint: Any,
    allow_unused: bool,
    fly: Callable[[MicroBatch], Any] | None = None,
) -> tuple[float, list[str]]:
    """Fly; the weight of a group of micro-batches over all ranks, and the parameters without a gradient."""
    ranks, value = collectives.world(), None
    if mesh.data_ranks < mesh.degrees.world:
        _require_same_samples(collectives.all_gather_object([mesh.data_rank, digest(list(tensors_in(micro.batch)))]))
    with _restored(module):
        draw.samples, draw.draws = micro, 0
        if fly is not None:  # a pipeline has its own way
            weight = fly(micro)
        else:
            value, weight = wrapped.forward(micro.batch)
            with _named_change_in_place():
                (value * 0.0).backward()
        draw.samples = None
    unused = [name for name, p in module.model.named_parameters() if p.requires_grad and p.grad is None]
    module.zero_grad(set_to_none=True)
    if unused and ranks > 1 and not allow_unused:
        raise unused_error(module.model, unused)
    counts = micro.samples > 0 and mesh.reports_loss
    own = float(micro.samples if weight is None else weight) if counts else 0.0
    facts = {
        "weight": own,
        "versions": versions(),
        # Where they are cut, they come from rank 0.
        "weights": _digests(module.model) if ranks > 1 and mesh.degrees.is_replicated else {},
        "data": fingerprint,
        "loss": [mesh.data_rank, None if value is None else float(value.detach())],
        "rows": _rows(micro.batch) if counts and not micro.exact else [],
    }
    everyone = collectives.all_gather_object(facts)
    if mesh.repeats_loss:
        _require_one_loss([rank["loss"] for rank in everyone])
    consistency.require_same_versions([rank["versions"] for rank in everyone])
    consistency.require_same_weights([rank["weights"] for rank in everyone])
    _require_same_data([rank["data"] for rank in everyone])
    _require_disjoint([rank["rows"] for rank in everyone])
    return sum(rank["weight"] for rank in everyone), unused


@contextmanager
def _named_change_in_place() -> Iterator[None]:
    """What FSDP's hooks can't follow shows in the first backward, as storage that is gone."""
    try:
        yield
    except RuntimeError as error:
        if "setStorage" not in str(error):
            raise
        raise LayoutError(
            "changed-in-place",
            "The model changes a block's output in place (`y = block(x); y += x`), which sharding can't follow.",
            why="the output is a view of what the block's hooks watch: its weights are given back too early",
            fix="write y = y + x, or set fsdp: {reshard: false} and compare with `paceline parity`",
        ) from error


def _require_same_samples(batches: list[tuple[int, int]]) -> None:
    """Ranks along the tensor and pipeline axes compute parts of one thing: what they are given has to be the same."""
    seen: dict[int, tuple[int, int]] = {}
    for rank, (data_rank, content) in enumerate(batches):
        first, expected = seen.setdefault(data_rank, (rank, content))
        if content != expected:
            raise LayoutError(
                "different-batches",
                f"Ranks {first} and {rank} share one part of the data, but got different samples.",
                why="they hold parts of the model, not of the data: each computes a part of what the same samples give",
                fix="give the dataset, or a DataLoader without DistributedSampler, to the Trainer; in a loop of your "
                "own use trainer.loader(dataset), or the same batch on all ranks of a tensor or pipeline axis",
            )


def _require_one_loss(losses: list[tuple[int, float | None]]) -> None:
    """Ranks along the tensor axis have the same samples, and a plan that means the model gives them the same loss."""
    seen: dict[int, tuple[int, float]] = {}
    for rank, (data_rank, loss) in enumerate(losses):
        if loss is None:
            continue
        first, expected = seen.setdefault(data_rank, (rank, loss))
        if abs(loss - expected) > _ROUNDING * max(abs(expected), 1e-6):
            raise LayoutError(
                "tensor-plan-changes-loss",
                f"On the same samples, rank {first} has the loss {expected:.6g} and rank {rank} {loss:.6g}.",
                why="the tensor plan does not fit what the model computes: the outputs of a column layer have to meet "
                "a row layer, with nothing between them that mixes outputs",
                fix="name the row layer that follows each column layer, or leave the layer out of the plan; "
                "`paceline parity` shows when it is right",
            )


def nominal(weight: float, groups: int) -> float:
    """A power of two near a step's weight: dividing by it costs no rounding."""
    return 2.0 ** round(log2(max(1.0, weight * groups)))


def versions() -> dict[str, str]:
    return {"paceline": paceline.__version__, "torch": torch.__version__, "python": platform.python_version()}


@contextmanager
def named_unused(model: nn.Module) -> Iterator[None]:
    """DDP finds parameters without a gradient too, one step late and by number: their names instead."""
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        unused = [names[int(number)] for number in numbers.group(1).split()] if numbers else names
        raise unused_error(model, unused) from error


def unused_error(model: nn.Module, names: list[str]) -> TrainError:
    owners = sorted({type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names})
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else "")
    return TrainError(
        "unused-parameters",
        f"The loss does not depend on {shown} (in {', '.join(owners)}).",
        why="on several ranks the reduction is complete only when every trainable parameter got a gradient",
        fix="use them in forward, freeze them with requires_grad_(False), or set unused_parameters: allow",
    )


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Buffers and random state as they were."""
    buffers = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    on_gpu = torch.cuda.is_initialized()
    gpu_state = torch.cuda.get_rng_state() if on_gpu else None
    with preserve_rng_state():
        yield
    if gpu_state is not None:
        torch.cuda.set_rng_state(gpu_state)
    with torch.no_grad():
        for part, name, buffer, before in buffers:
            part._buffers[name] = buffer  # the forward may have put another in its place
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def _digests(model: nn.Module) -> dict[str, int]:
    return {name: _bits(parameter) for name, parameter in model.named_parameters()}


_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> int:
    """A sum over the tensor's bits, on its own device."""
    plain = tensor.detach().contiguous()
    return int(plain.view(_WHOLE_NUMBERS[plain.element_size()]).sum(dtype=torch.int64))


def _rows(batch: Any) -> list[int]:
    count = samples_in(batch)
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and len(tensor) == count]
    return [digest([tensor[row] for tensor in tensors]) for row in range(min(count, _ROWS_COMPARED))]


def _require_same_data(fingerprints: list[Any]) -> None:
    known = [repr(fingerprint) for fingerprint in fingerprints]
    if len(set(known)) > 1:
        raise DataError(
            "different-data",
            "The ranks hold different data (kind, length, checksums):\n" + consistency.by_rank(known),
            why="each rank takes its part of one dataset by arithmetic; with different datasets samples are lost "
            "and others seen twice",
            fix="build the dataset alike on every rank (a random split needs a seed) and let the Trainer share it "
            "out; preflight: false leaves this check out",
        )


def _require_disjoint(rows: list[list[int]]) -> None:
    for rank, own in enumerate(rows):
        # A few rows of two values may be the same by chance.
        twins = [other for other in range(rank) if len(set(own)) >= _ROWS_NEEDED and rows[other] == own]
        if twins:
            raise DataError(
                "same-samples",
                f"Ranks {twins[0]} and {rank} got the same samples.",
                why="each rank's batch should hold samples of its own; these are counted twice, and others never",
                fix="use trainer.loader(dataset), or a DistributedSampler; preflight: false leaves this check out",
            )
