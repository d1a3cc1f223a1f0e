"""Evaluation that counts each sample exactly once, on any number of ranks; and predictions, in the data's order.

Each rank runs its own share without talking to the others; sums and weights are added up at the end. A rank without
samples in a batch skips it, since nothing in an evaluation waits for anybody (but a batch norm without memory).
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
from paceline.parallel.fsdp import reshard_all
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.runtime.rng import derive_seed
from paceline.train.model_call import ModelCall, choose_outputs, outputs_in, read_loss, targets_in
from paceline.train.pipeline_step import PipelineLossModule
from paceline.train.step import LossModule

# A coordinate that no training step has, so that evaluation never reuses a step's noise.
_EVALUATION = -1


class Evaluation(float):
    """The mean loss, which is a number; with the metrics beside it, by name: `evaluation["accuracy"]`."""

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
    """The mean loss, and the metrics, over all samples of all ranks."""
    sums = _Sums(mesh.device)
    collected = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
    for metric in collected.values():
        metric.to(mesh.device)
        metric.reset()
    meet = _meets(module, mesh)
    with _evaluating(module, seed) as draw:
        for micro in micros:
            draw.samples, draw.draws = micro, 0
            if micro.samples and mesh.reports_loss:
                _add(sums, module, micro, metrics)
            elif meet:  # in its forward the ranks wait for each other
                _run(module, micro.batch, want_outputs=bool(metrics))
    reshard_all(module)
    values = sums.over_all_ranks()
    for name, metric in collected.items():
        values |= _compute(name, metric)
    return Evaluation({"loss": values.pop("loss", math.nan), **values})


def _meets(module: nn.Module, mesh: Mesh) -> bool:
    """Whether ranks wait for each other in a forward: for weights that are cut, or for a batch norm's statistics."""
    without_memory = any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules())
    return without_memory or not mesh.degrees.is_replicated


@contextmanager
def _evaluating(module: nn.Module, seed: int) -> Iterator[NoiseContext]:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad(), NoiseContext(derive_seed(seed, _EVALUATION)) as draw:
            yield draw
    finally:
        for part in training:  # one by one: the user may have frozen some
            part.training = True


class _Sums:
    """Σ value × weight and Σ weight by name, on the device until the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Any, weight: Any) -> None:
        parts = [
            torch.as_tensor(part, dtype=torch.float64, device=self._device).reshape(()) for part in (total, weight)
        ]
        pair = torch.stack(parts)
        self._sums[name] = pair if name not in self._sums else self._sums[name] + pair

    def over_all_ranks(self) -> dict[str, float]:
        """The means. A rank that had no samples knows no names."""
        return weighted_means({name: pair.tolist() for name, pair in self._sums.items()})


def weighted_means(own: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Means over all ranks by name, from this rank's (Σ value × weight, Σ weight). Ranks may know different names.

    Collective: must be called on every rank.
    """
    total: dict[str, list[float]] = {}
    for pairs in collectives.all_gather_object({name: list(pair) for name, pair in own.items()}):
        for name, (value, weight) in pairs.items():
            before = total.setdefault(name, [0.0, 0.0])
            before[0], before[1] = before[0] + value, before[1] + weight
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
            count = measured.numel() if measured.dim() else micro.samples  # one number a sample, or their mean
            sums.add(name, measured.mean() * count, count)


def _run(module: LossModule, batch: Any, *, want_outputs: bool) -> tuple[Any, Any]:
    """What the loss is read from and, for metrics, the outputs: from one forward where the model returns both."""
    call = module.call
    assert call is not None
    criterion = call.criterion
    if isinstance(module, PipelineLossModule):  # on ranks without the last stage there is neither
        outputs = module(batch, call.outputs)
        return None if outputs is None else module.made_of(outputs, batch, call.loss), outputs
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
            f"The metric {name} compares outputs with targets, but the batch has none.",
            fix="give (input, target) batches or dicts with `targets` or `labels`; or return metrics with the loss: "
            '{"loss": …, "metrics": {"accuracy": …}}',
        )
    return targets


def _compute(name: str, metric: Any) -> dict[str, float]:
    """A torchmetrics object adds up over the ranks by itself; one on a rank without samples warns, for nothing."""
    _fill_empty_lists(metric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = metric.compute()
    parts = {f"{name}_{key}": value for key, value in result.items()} if isinstance(result, Mapping) else {name: result}
    for key, value in parts.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise TrainError(
                "not-a-number",
                f"The metric {key!r} gives a tensor of shape {tuple(value.shape)}.",
                fix='use a metric that gives one number, e.g. average="macro"',
            )
    return {key: float(value) for key, value in parts.items()}


def _fill_empty_lists(metric: Any) -> None:
    """A rank that saw no samples has empty lists, which torchmetrics takes for float32: the others' kind instead."""
    own = {
        name: getattr(metric, name)
        for name, value in getattr(metric, "_defaults", {}).items()
        if isinstance(value, list)
    }
    if not own or collectives.world() == 1:
        return
    kinds = {
        name: [str(values[0].dtype).removeprefix("torch."), list(values[0].shape[1:])] if values else None
        for name, values in own.items()
    }
    everyone = collectives.all_gather_object(kinds)
    for name, values in own.items():
        known = next((rank[name] for rank in everyone if rank[name]), None)
        if not values and known:
            dtype, shape = known
            setattr(metric, name, [torch.empty((0, *shape), dtype=getattr(torch, dtype), device=metric.device)])


def predict(module: LossModule, micros: Iterable[MicroBatch], mesh: Mesh, seed: int) -> Any:
    """The model's outputs for every sample, in the data's order, on the CPU of every rank."""
    own: list[Any] = []
    places: list[int] = []
    call: ModelCall | None = None
    seen = 0
    with _evaluating(module, seed) as draw:
        for micro in micros:
            if not micro.samples and not _meets(module, mesh):
                seen += micro.step_samples * micro.last
                continue
            draw.samples, draw.draws = micro, 0
            call = call or choose_outputs(module.model, micro.batch)
            outputs = module(micro.batch, call)
            if micro.samples and mesh.reports_loss:
                own.append(apply(_bare(outputs), Tensor.cpu))
                places.extend(range(seen + micro.start, seen + micro.start + micro.samples))
            seen += micro.step_samples * micro.last
    reshard_all(module)
    return _in_order(own, places, mesh.device)


def _bare(outputs: Any) -> Any:
    """A Hugging Face output is an object around its logits."""
    inner = None if isinstance(outputs, (Tensor, tuple, list)) else outputs_in(outputs)
    return outputs if inner is None else inner


def _in_order(own: list[Any], places: list[int], device: torch.device) -> Any:
    """Every rank's rows on every rank, by their place in the data."""
    skeletons = collectives.all_gather_object(apply(own[0], _no_tensor) if own else "nothing")
    like = own[0] if own else next(skeleton for skeleton in skeletons if skeleton != "nothing")
    flat = [torch.cat(rows) for rows in zip(*(list(tensors_in(part)) for part in own), strict=True)]
    shapes = collectives.all_gather_object(
        {"places": places, "kinds": [[str(t.dtype).removeprefix("torch."), list(t.shape[1:])] for t in flat]}
    )
    most = max(len(rank["places"]) for rank in shapes)
    kinds = next(rank["kinds"] for rank in shapes if rank["places"])
    order = torch.tensor([place for rank in shapes for place in rank["places"]]).argsort()
    whole = []
    for number, (dtype, shape) in enumerate(kinds):
        padded = torch.zeros((most, *shape), dtype=getattr(torch, dtype), device=device)
        if own:
            padded[: len(places)] = flat[number].to(device)
        parts = [torch.empty_like(padded) for _ in shapes]
        collectives.all_gather(parts, padded)
        rows = [part[: len(rank["places"])].cpu() for part, rank in zip(parts, shapes, strict=True)]
        whole.append(torch.cat(rows)[order])
    return _refill(like, iter(whole))


def _no_tensor(tensor: Tensor) -> Any:
    return None


def _refill(like: Any, tensors: Iterator[Tensor]) -> Any:
    """The shape of the outputs; a rank that had none knows it from another, with None where tensors were."""
    if like is None:
        return next(tensors)
    if isinstance(like, (list, tuple)) and None in like:
        return type(like)(_refill(part, tensors) for part in like)
    if isinstance(like, Mapping) and None in like.values():
        return {key: _refill(part, tensors) for key, part in like.items()}
    return apply(like, lambda _: next(tensors))
