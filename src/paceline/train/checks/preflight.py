"""The pre-flight: checks before the first step that all ranks agree.

It runs a copy of the first micro-batch with weight zero, and undoes what the forward changes (snapshot.py). This makes
DDP rebuild its buckets (or sums would run in another order after a resume), finds unused parameters and what a forward
keeps, compiles, and measures the weight of a micro-batch. Then ranks compare library versions, weights and data. A
difference is an error that names the ranks.

One rank has nothing to compare. It takes what the first step shows, so user code runs exactly as in a plain loop.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import log2
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import paceline
from paceline.data.batches import digest, samples_in, tensors_in
from paceline.data.loader import MicroBatch
from paceline.errors import DataError, LayoutError, TrainError
from paceline.models.divisor import Divisor
from paceline.models.loss_module import LossModule
from paceline.models.weights import checksum
from paceline.parallel.dynamic_ddp import DynamicDDP, Forward
from paceline.parallel.fsdp import unreached
from paceline.parallel.model_parts import ModelParts
from paceline.runtime import collectives, consistency
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.text import by_rank, listed
from paceline.train.checks import forward_changes, same_model, snapshot
from paceline.train.checks.split_invariance import LossTrial

_SHOWN = 8
_ROWS_COMPARED = 64
_ROWS_NEEDED = 4
_LOSS_TOLERANCE = 1e-3  # above the rounding of half precision, below the error of a wrong plan


_ONCE_DIFFERENTIABLE = {  # part of torch's message → what can't be differentiated twice, what to do
    "once_differentiable": (
        "a batch norm that is synchronized over ranks, or a cross-entropy of logits that are sharded",
        "set sync_batchnorm=False, or use GroupNorm or LayerNorm; for logits, replicate the head",
    ),
    "does not currently support double backward": ("a compiled graph", "set compile=False"),
}


def check(
    trial: LossTrial,
    parts: ModelParts,
    mesh: Mesh,
    *,
    fingerprint: Any,
    allow_unused: bool,
    compiled: bool,
    same_weights: bool,
    run_zero_weight: Callable[[MicroBatch], Any] | None,
) -> tuple[float, bool, tuple[list[str], list[str]], bool]:
    """Return the weight of one micro-batch summed over ranks, whether it depends on the data, the buffers that the
    forward changes, and whether it changes attributes."""
    module, _, micro, draw, user_code = trial
    value, copy = None, replace(micro, batch=snapshot.copied(micro.batch))
    if mesh.data_ranks < mesh.degrees.world:
        _require_same_samples(collectives.all_gather_object([mesh.data_rank, digest(list(tensors_in(micro.batch)))]))
    same_model.require_same_structure(micro.batch)
    module.zero_grad(set_to_none=True)
    with snapshot.preserved(module.model, *user_code):
        draw.begin(copy)
        with forward_changes.watched(module.model, mesh, compiled=compiled, criteria=module.loss_state) as changes:
            if run_zero_weight is not None:  # a pipeline
                weight = run_zero_weight(copy)
            else:
                value, weight = parts.forward(copy.batch)
        if value is not None:
            _run_backward(module, value, parts.forward, allow_unused)
        draw.end()
        unused = without_gradient(module.model)
    module.zero_grad(set_to_none=True)
    if unused and not allow_unused:
        raise unused_parameters_error(module.model, unused)
    counts = micro.samples > 0 and mesh.reports_loss
    kind, number = read_weight(weight, micro)
    compare = mesh.degrees.is_replicated and same_weights  # sharded ones are broadcast from rank 0
    facts = {
        "weight": number if counts else 0.0,
        "divides": module.divides is not False,
        "depends": weight is not None,
        "kind": kind if run_zero_weight is None else "",  # one rank of a pipeline has the loss
        "versions": versions(),
        "weights": {name: checksum(parameter) for name, parameter in module.model.named_parameters() if compare},
        "data": fingerprint,
        "loss": [mesh.data_rank, None if value is None else float(value.detach())],
        "rows": _rows(micro.batch) if counts and not micro.exact else [],
        "changes": changes,
    }
    gathered = collectives.all_gather_object(facts)
    _require_agreement(gathered, repeats_loss=mesh.repeats_loss)
    if not all(rank["divides"] for rank in gathered):  # ranks must weight losses in the same way
        module.divides = False
    found = [rank["changes"] for rank in gathered]
    buffers, keeps = forward_changes.changed_buffers(found, mesh), any(each["attributes"] for each in found)
    depends = all(rank["depends"] and rank["divides"] for rank in gathered)
    return sum(rank["weight"] for rank in gathered), depends, buffers, keeps


def _require_agreement(gathered: Sequence[dict[str, Any]], *, repeats_loss: bool) -> None:
    if repeats_loss:
        _require_one_loss([rank["loss"] for rank in gathered])
    _require_one_kind([rank["kind"] for rank in gathered])
    consistency.require_same_versions([rank["versions"] for rank in gathered])
    consistency.require_same_weights([rank["weights"] for rank in gathered])
    _require_same_data([rank["data"] for rank in gathered])
    _require_disjoint([rank["rows"] for rank in gathered])


def _run_backward(module: LossModule, value: Any, forward: Forward, allow_unused: bool) -> None:
    _require_plain(value)
    value = forward.with_slot(value) if isinstance(forward, DynamicDDP) else value
    if not allow_unused and isinstance(module, FSDPModule):
        _require_same_graph(module, value)
    with explain_backward():
        (value * 0.0).backward()


def _require_same_graph(module: LossModule, loss: Any) -> None:
    """A backward that reaches other parameters on other ranks would reduce gradients of different blocks together."""
    unused = [name.removeprefix("model.") for name in unreached(module, loss)]
    ranks = collectives.all_gather_object(unused)
    if any(names != ranks[0] for names in ranks):
        raise unused_parameters_error(module.model, next(names for names in ranks if names))


def _require_plain(loss: Any) -> None:
    if isinstance(loss, DTensor):
        raise LayoutError(
            "loss-of-shards", "The loss is computed from sharded parameters, outside the forward of their block."
        )


def require_gradients(model: nn.Module, replicas: DynamicDDP) -> None:
    """Call after the last backward of a step: in the next collective, ranks would exchange gradients for other data."""
    unused = replicas.without_gradient()
    if unused:
        raise unused_parameters_error(model, unused)


def without_gradient(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def warm_up(model: nn.Module, forward: Forward, batch: Any, draw: NoiseContext, user_code: Sequence[Any]) -> Any:
    """Run a batch with weight zero through a new DDP wrapper: after its first backward, DDP rebuilds its buckets.
    Returns its weight."""
    with snapshot.preserved(model, *user_code), draw.copy():
        value, weight = forward(snapshot.copied(batch))
        (value * 0.0).backward()
    return weight


@contextmanager
def explain_backward() -> Iterator[None]:
    """Name the causes of obscure errors of a first backward."""
    try:
        yield
    except RuntimeError as error:
        if "setStorage" in str(error):
            raise LayoutError(
                "changed-in-place",
                "The model modifies the output of a block in place (`y = block(x); y += x`), which FSDP does not "
                "support.",
            ) from error
        if "modified by an inplace operation" in str(error) and not hasattr(error, "__notes__"):
            error.add_note(
                "paceline: to see the line of forward(), call torch.autograd.set_detect_anomaly(True) before train(); "
                "then replace x += y, x.relu_() or x[i] = y after it by operations that return a new tensor"
            )
            raise
        for sign, (part, fix) in _ONCE_DIFFERENTIABLE.items():
            if sign in str(error):
                raise LayoutError(
                    "double-backward",
                    f"The loss contains gradients (autograd.grad with create_graph=True) through {part}.",
                    fix=fix,
                ) from error
        raise


def _require_same_samples(batches: list[tuple[int, int]]) -> None:
    """Ranks along the tensor and pipeline axes must receive the same samples."""
    seen: dict[int, tuple[int, int]] = {}
    for rank, (data_rank, content) in enumerate(batches):
        first, expected = seen.setdefault(data_rank, (rank, content))
        if content != expected:
            raise LayoutError(
                "different-batches",
                f"Ranks {first} and {rank} belong to the same data rank, but received different samples.",
            )


def _require_one_loss(losses: list[tuple[int, float | None]]) -> None:
    """Ranks along the tensor axis have the same samples, so with a valid tensor plan they have the same loss."""
    seen: dict[int, tuple[int, float]] = {}
    for rank, (data_rank, loss) in enumerate(losses):
        if loss is None:
            continue
        first, expected = seen.setdefault(data_rank, (rank, loss))
        if abs(loss - expected) > _LOSS_TOLERANCE * max(abs(expected), 1e-6):
            raise LayoutError(
                "tensor-plan-changes-loss",
                f"For the same samples, the loss is {expected:.6g} on rank {first} but {loss:.6g} on rank {rank}.",
            )


def read_weight(weight: Any, micro: MicroBatch) -> tuple[str, float]:
    """The kind of a loss, and its weight."""
    if weight is None or isinstance(weight, Divisor):
        return "a mean", float(micro.samples if weight is None else weight.weight)
    return "paceline.Loss(sum, weight)", float(weight)


def _require_one_kind(kinds: list[str]) -> None:
    if len(set(kinds)) > 1:
        raise TrainError("loss-changed-kind", f"The losses of ranks are of different kinds:\n{by_rank(kinds)}")


def nominal(weight: float, groups: int) -> float:
    """A power of two near the weight of a step: dividing by it does not round."""
    return power_of_two(max(1.0, weight * groups))


def power_of_two(number: float) -> float:
    """The nearest one; 1 for zero."""
    return 2.0 ** round(log2(number)) if number > 0 else 1.0


def versions() -> dict[str, str]:
    return {"paceline": paceline.__version__, "torch": torch.__version__, "python": platform.python_version()}


@contextmanager
def explain_unused_parameters(model: nn.Module) -> Iterator[None]:
    """DDP reports parameters without a gradient one step late and by index: report their names."""
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        known = range(len(names)) if indices is None else map(int, indices[1].split())
        raise unused_parameters_error(model, [names[each] for each in known if each < len(names)]) from error


def unused_parameters_error(model: nn.Module, names: list[str]) -> TrainError:
    modules = sorted({type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names})
    return TrainError(
        "unused-parameters", f"The loss does not depend on {listed(names, _SHOWN)} (in {', '.join(modules)})."
    )


def _rows(batch: Any) -> list[int]:
    count = samples_in(batch)
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and len(tensor) == count]
    return [digest([tensor[row] for tensor in tensors]) for row in range(min(count, _ROWS_COMPARED))]


def _require_same_data(fingerprints: list[Any]) -> None:
    known = [repr(fingerprint) for fingerprint in fingerprints]
    if len(set(known)) > 1:
        raise DataError(
            "different-data",
            "Ranks have different data (type, length, checksums):\n" + by_rank(known),
            why="each rank selects its shard of one dataset by index; with different datasets some samples are lost "
            "and others are read twice",
            fix="build the same dataset on every rank (seed random splits) and let the Trainer shard it; "
            "preflight=False disables this check",
        )


def _require_disjoint(rows: list[list[int]]) -> None:
    for rank, local in enumerate(rows):
        # A few rows with two distinct values may be equal by chance.
        duplicates = [other for other in range(rank) if len(set(local)) >= _ROWS_NEEDED and rows[other] == local]
        if duplicates:
            raise DataError(
                "same-samples",
                f"Ranks {duplicates[0]} and {rank} received the same samples.",
                why="each rank's batch must hold different samples; these would be counted twice, others never",
                fix="use trainer.loader(dataset), or a DistributedSampler; preflight=False disables this check",
            )
