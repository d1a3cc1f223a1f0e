"""Evaluation that counts each sample exactly once on any number of ranks, and predictions in the order of the data.

Ranks evaluate their shards independently; sums and weights are reduced at the end. A rank without samples in a batch
skips it, unless the forward itself is collective.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.data.batches import apply, tensors_in
from paceline.data.loader import MicroBatch
from paceline.errors import TrainError
from paceline.models.loss_module import LossModule
from paceline.models.model_call import ModelCall, choose_outputs, outputs_in, read_loss, targets_in
from paceline.parallel.fsdp import reshard_all
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.runtime.rng import derive_seed
from paceline.train.pipeline_step import PipelineLossModule

# No training step has this number, so evaluation never reuses the noise of a step.
_EVALUATION = -1


class Evaluation(float):
    """The mean loss as a float, with the metrics by name: `evaluation["accuracy"]`."""

    def __new__(cls, values: Mapping[str, float]) -> Evaluation:
        self = super().__new__(cls, values["loss"])
        self.values = dict(values)
        return self

    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def __reduce__(self) -> Any:
        return Evaluation, (self.values,)


def evaluate(
    module: LossModule, micros: Iterable[MicroBatch], mesh: Mesh, seed: int, metrics: Mapping[str, Any]
) -> Evaluation:
    """Return the mean loss and the metrics over all samples of all ranks."""
    sums = _Sums(mesh.device)
    collected = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
    for metric in collected.values():
        metric.to(mesh.device)
        metric.reset()
    needs_every_rank = _needs_every_rank(module, mesh)
    with _evaluating(module, seed) as draw:
        for micro in micros:
            draw.samples, draw.draws = micro, 0
            if micro.samples and mesh.reports_loss:
                _add(sums, module, micro, metrics)
            elif needs_every_rank:
                _run(module, micro.batch, want_outputs=bool(metrics))
    reshard_all(module)
    values = sums.reduce()
    for name, metric in collected.items():
        values |= _compute(name, metric)
    return Evaluation({"loss": values.pop("loss", math.nan), **values})


def _needs_every_rank(module: nn.Module, mesh: Mesh) -> bool:
    """Whether the forward is collective: for sharded parameters, or batch norm without running statistics."""
    uses_batch_statistics = any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules())
    return uses_batch_statistics or not mesh.degrees.is_replicated


@contextmanager
def _evaluating(module: nn.Module, seed: int) -> Iterator[NoiseContext]:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad(), NoiseContext(derive_seed(seed, _EVALUATION)) as draw:
            yield draw
    finally:
        for part in training:  # one by one: the user may have set some to eval mode
            part.training = True


class _Sums:
    """Σ value × weight and Σ weight by name, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Any, weight: Any) -> None:
        parts = [
            torch.as_tensor(part, dtype=torch.float64, device=self._device).reshape(()) for part in (total, weight)
        ]
        pair = torch.stack(parts)
        self._sums[name] = pair if name not in self._sums else self._sums[name] + pair

    def reduce(self) -> dict[str, float]:
        return weighted_means({name: pair.tolist() for name, pair in self._sums.items()})


def weighted_means(local: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return means over all ranks by name, from this rank's (Σ value × weight, Σ weight). Names may differ by rank.

    Collective: must be called on every rank.
    """
    total: dict[str, list[float]] = {}
    for pairs in collectives.all_gather_object({name: list(pair) for name, pair in local.items()}):
        for name, (value, weight) in pairs.items():
            sums = total.setdefault(name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + value, sums[1] + weight
    return {name: value / weight if weight else math.nan for name, (value, weight) in total.items()}


def _add(sums: _Sums, module: LossModule, micro: MicroBatch, metrics: Mapping[str, Any]) -> None:
    result, outputs = _run(module, micro.batch, want_outputs=bool(metrics))
    value, weight, inner = read_loss(result)
    if weight is None:
        value, weight = value * micro.samples, micro.samples
    sums.add("loss", value, weight)
    for name, metric in (inner or {}).items():
        sums.add(name, metric * weight, weight)
    for name, metric in metrics.items():
        targets = _targets(micro.batch, name)
        if hasattr(metric, "compute"):
            metric.update(outputs, targets)
        else:
            measured = torch.as_tensor(metric(outputs, targets)).double()
            count = measured.numel() if measured.dim() else micro.samples  # one value per sample, or their mean
            sums.add(name, measured.mean() * count, count)


def _run(module: LossModule, batch: Any, *, want_outputs: bool) -> tuple[Any, Any]:
    """Return the result that contains the loss and, for metrics, the outputs; from one forward if possible."""
    call = module.call
    assert call is not None
    criterion = call.criterion
    if isinstance(module, PipelineLossModule):  # both are None on ranks without the last stage
        outputs = module(batch, call.outputs)
        return None if outputs is None else module.result_of(outputs, batch, call.loss), outputs
    if want_outputs and criterion is not None:
        outputs = module(batch, call.outputs)
        return criterion(outputs, batch[1]), outputs
    result = module(batch, call.loss)
    if not want_outputs:
        return result, None
    outputs = outputs_in(result)
    return result, module(batch, call.outputs) if outputs is None else outputs


def _targets(batch: Any, name: str) -> Any:
    targets = targets_in(batch)
    if targets is None:
        raise TrainError(
            "no-targets",
            f"Metric {name!r} needs targets, but the batch has none.",
            fix="use (input, target) batches or dicts with `targets` or `labels`; or return metrics with the loss: "
            '{"loss": …, "metrics": {"accuracy": …}}',
        )
    return targets


def _compute(name: str, metric: Any) -> dict[str, float]:
    """torchmetrics reduces over ranks itself. It warns on ranks without samples, which are expected here."""
    _fill_empty_lists(metric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = metric.compute()
    parts = {f"{name}_{key}": value for key, value in result.items()} if isinstance(result, Mapping) else {name: result}
    for key, value in parts.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise TrainError(
                "not-a-number",
                f"Metric {key!r} returned a tensor of shape {tuple(value.shape)}, expected a scalar.",
                fix='use a metric that returns a scalar, e.g. average="macro"',
            )
    return {key: float(value) for key, value in parts.items()}


def _fill_empty_lists(metric: Any) -> None:
    """torchmetrics assumes float32 for the empty lists of a rank without samples: use the dtype of other ranks."""
    local = {
        name: getattr(metric, name)
        for name, value in getattr(metric, "_defaults", {}).items()
        if isinstance(value, list)
    }
    if not local or collectives.world() == 1:
        return
    kinds = {
        name: [str(values[0].dtype).removeprefix("torch."), list(values[0].shape[1:])] if values else None
        for name, values in local.items()
    }
    gathered = collectives.all_gather_object(kinds)
    for name, values in local.items():
        known = next((rank[name] for rank in gathered if rank[name]), None)
        if not values and known:
            dtype, shape = known
            setattr(metric, name, [torch.empty((0, *shape), dtype=getattr(torch, dtype), device=metric.device)])


def predict(module: LossModule, micros: Iterable[MicroBatch], mesh: Mesh, seed: int) -> Any:
    """Return the outputs for all samples, in the order of the data, on the CPU of every rank."""
    local: list[Any] = []
    positions: list[int] = []
    call: ModelCall | None = None
    seen = 0
    with _evaluating(module, seed) as draw:
        for micro in micros:
            if not micro.samples and not _needs_every_rank(module, mesh):
                seen += micro.step_samples * micro.last
                continue
            draw.samples, draw.draws = micro, 0
            call = call or choose_outputs(module.model, micro.batch)
            outputs = module(micro.batch, call)
            if micro.samples and mesh.reports_loss:
                local.append(apply(_unwrap_output(outputs), Tensor.cpu))
                positions.extend(range(seen + micro.start, seen + micro.start + micro.samples))
            seen += micro.step_samples * micro.last
    reshard_all(module)
    return _gather_in_order(local, positions, mesh.device)


def _unwrap_output(outputs: Any) -> Any:
    """The logits of a Hugging Face output."""
    inner = None if isinstance(outputs, (Tensor, tuple, list)) else outputs_in(outputs)
    return outputs if inner is None else inner


def _gather_in_order(local: list[Any], positions: list[int], device: torch.device) -> Any:
    """Gather the rows of all ranks, ordered by their position in the data."""
    skeletons = collectives.all_gather_object(apply(local[0], _to_none) if local else "nothing")
    like = local[0] if local else next(skeleton for skeleton in skeletons if skeleton != "nothing")
    flat = [torch.cat(rows) for rows in zip(*(list(tensors_in(part)) for part in local), strict=True)]
    shapes = collectives.all_gather_object(
        {"positions": positions, "kinds": [[str(t.dtype).removeprefix("torch."), list(t.shape[1:])] for t in flat]}
    )
    most = max(len(rank["positions"]) for rank in shapes)
    kinds = next(rank["kinds"] for rank in shapes if rank["positions"])
    order = torch.tensor([place for rank in shapes for place in rank["positions"]]).argsort()
    gathered = []
    for number, (dtype, shape) in enumerate(kinds):
        padded = torch.zeros((most, *shape), dtype=getattr(torch, dtype), device=device)
        if local:
            padded[: len(positions)] = flat[number].to(device)
        parts = [torch.empty_like(padded) for _ in shapes]
        collectives.all_gather(parts, padded)
        rows = [part[: len(rank["positions"])].cpu() for part, rank in zip(parts, shapes, strict=True)]
        gathered.append(torch.cat(rows)[order])
    return _refill(like, iter(gathered))


def _to_none(tensor: Tensor) -> Any:
    return None


def _refill(like: Any, tensors: Iterator[Tensor]) -> Any:
    """Fill `tensors` into the structure of the outputs. On a rank without samples `like` has None for tensors."""
    if like is None:
        return next(tensors)
    if isinstance(like, (list, tuple)) and None in like:
        return type(like)(_refill(part, tensors) for part in like)
    if isinstance(like, Mapping) and None in like.values():
        return {key: _refill(part, tensors) for key, part in like.items()}
    return apply(like, lambda _: next(tensors))
