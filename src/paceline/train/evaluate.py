"""Evaluation that counts each sample exactly once on any number of ranks, and predictions in the order of the data.

Ranks evaluate their shards independently; sums and weights are reduced at the end. A rank without samples in a batch
skips it, unless the forward itself is collective.

What follows from an evaluation (keep the best checkpoint, reduce the learning rate, stop early) is the same on all
ranks, which act on rank 0's values: a user's metric may differ between ranks, and ranks that disagree on whether to
continue would deadlock.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.config.recipe import Config
from paceline.data.batches import apply
from paceline.data.loader import MicroBatch
from paceline.data.predictions import gather_outputs
from paceline.errors import TrainError
from paceline.models.divisor import divisor_of, weighted_mean
from paceline.models.loss_module import LossModule
from paceline.models.losses import WeightedSums, weighted_means
from paceline.models.metrics import weigh_metric
from paceline.models.model_call import ModelCall, choose_outputs, outputs_in, read_loss, targets_in
from paceline.optim.schedules import Best
from paceline.parallel.fsdp import reshard_all
from paceline.run.heartbeat import counters
from paceline.run.history import Record
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.runtime.rng import derive_seed
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.features.schedule import LearningRate
from paceline.train.metric_functions import MetricFunctions

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
    module: LossModule,
    micros: Iterable[MicroBatch],
    mesh: Mesh,
    seed: int,
    metrics: Mapping[str, Any],
    samples: int | None,
    warn: Callable[[str], None],
) -> Evaluation:
    """Return the mean loss and the metrics over all samples of all ranks. `samples` is their number, if known."""
    sums = WeightedSums(mesh.device)
    objects = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
    for name, metric in objects.items():
        _warn_unless_reduced(name, metric, warn)
        metric.to(mesh.device)
        metric.reset()
    others = {name: metric for name, metric in metrics.items() if name not in objects}
    functions = MetricFunctions(others, mesh, samples, warn)
    needs_every_rank, seen = _needs_every_rank(module, mesh), 0
    with _evaluating(module, seed) as draw:
        for micro in micros:
            counters.read += 1
            draw.begin(micro)
            if micro.samples and mesh.reports_loss:
                outputs = _add_loss(sums, module, micro, want_outputs=bool(metrics))
                if metrics:
                    targets = _targets(micro.batch, next(iter(metrics)))
                    functions.add(outputs, targets, micro.samples, seen + micro.start)
                    for metric in objects.values():
                        metric.update(outputs, targets)
            elif needs_every_rank:
                _run(module, micro.batch, want_outputs=bool(metrics))
            seen += micro.step_samples * micro.last
    means = weighted_means(sums.totals())
    values = {"loss": means.pop("loss", math.nan), **means, **functions.values()}
    for name, metric in objects.items():
        values |= _compute(name, metric)
    return Evaluation(values)


def joined(sets: Mapping[str, Evaluation]) -> Evaluation:
    """The values of validation sets, each with the prefix of its set, and the mean of their losses."""
    values = {f"{prefix}{name}": value for prefix, each in sets.items() for name, value in each.values.items()}
    return Evaluation({"loss": sum(sets.values()) / len(sets), **values})


def _first_step(micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    for micro in micros:
        yield micro
        if micro.last:
            return


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
        reshard_all(module)
        for part in training:  # one by one: the user may have set some to eval mode
            part.training = True


def _add_loss(sums: WeightedSums, module: LossModule, micro: MicroBatch, *, want_outputs: bool) -> Any:
    """Add the loss of a batch, and the metrics that the model returns with it. Returns the outputs, for metrics."""
    assert module.call is not None
    # It costs time in every operation. A criterion shows its divisor without it.
    needs_graph = module.call.criterion is None and module.divides is not False and not module.has_weights
    work = partial(_run, module, micro.batch, want_outputs=want_outputs)
    result, outputs = module.recorded(work) if needs_graph else work()
    value, weight, inner = read_loss(result)
    module.has_weights = weight is not None
    if weight is None:
        if needs_graph and module.divides and divisor_of(value) is None and module.proportions.is_listening:
            module.proportions.say("In evaluation, a mean does not show its divisor: it is weighted by its samples.")
        value, weight = weighted_mean(value, micro.samples, divides=module.divides)
    sums.add("loss", value, weight)
    for name, metric in (inner or {}).items():
        sums.add(name, *weigh_metric(name, metric, weight))
    return apply(outputs, _widen) if want_outputs else None


def _widen(tensor: Tensor) -> Tensor:
    """Half precision is too coarse for what metrics do with outputs: bfloat16 can't count beyond 256."""
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).detach()


def run_loss(module: LossModule, batch: Any) -> Any:
    """Return the result that contains the loss; None on ranks without the last stage of a pipeline."""
    return _run(module, batch, want_outputs=False)[0]


def _run(module: LossModule, batch: Any, *, want_outputs: bool) -> tuple[Any, Any]:
    """Return the result that contains the loss and, for metrics, the outputs; from one forward if possible."""
    call = module.call
    assert call is not None
    if module.result_of is not None:  # both are None on ranks without the last stage
        outputs = module(batch, _without_targets)
        return None if outputs is None else module.result_of(outputs, batch, call.loss), outputs
    if want_outputs and call.criterion is not None:
        both: tuple[Any, Any] = module(batch, _with_outputs(call.loss))
        return both
    result = module(batch, call.loss)
    if not want_outputs:
        return result, None
    outputs = outputs_in(result)
    return result, module(batch, call.outputs) if outputs is None else outputs


def _without_targets(model: Any, batch: Any) -> Any:
    """For the last stage of a pipeline, which has the outputs."""
    return model(batch)


def _with_outputs(loss: ModelCall) -> ModelCall:
    """A call that returns the result of `loss` together with the outputs that it was computed from."""

    def call(model: Any, batch: Any) -> tuple[Any, Any]:
        outputs: list[Any] = []

        def kept(*arguments: Any, **named: Any) -> Any:
            outputs.append(model(*arguments, **named))
            return outputs[-1]

        return loss(kept, batch), outputs[-1]

    return call


def _targets(batch: Any, name: str) -> Any:
    targets = targets_in(batch)
    if targets is None:
        raise TrainError("no-targets", f"Metric {name!r} needs targets, but the batch has none.")
    return targets


def _warn_unless_reduced(name: str, metric: Any, warn: Callable[[str], None]) -> None:
    """Metrics of torchmetrics have `sync`, and their collections have `compute_groups`."""
    if collectives.world() > 1 and not (hasattr(metric, "sync") or hasattr(metric, "compute_groups")):
        warn(
            f"metric {name!r}, a {type(metric).__name__}, is not of torchmetrics: unless its compute() combines its "
            "state over ranks, it reports the samples of rank 0 only"
        )


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
    local: list[tuple[Any, int]] = []
    positions: list[int] = []
    call: ModelCall | None = None
    seen = 0
    with _evaluating(module, seed) as draw:
        for micro in micros:
            counters.read += 1
            if not micro.samples and not _needs_every_rank(module, mesh):
                seen += micro.step_samples * micro.last
                continue
            draw.begin(micro)
            call = call or choose_outputs(module.model, micro.batch)
            outputs = module(micro.batch, call)
            if micro.samples and mesh.reports_loss:
                local.append((apply(_unwrap_output(outputs), Tensor.cpu), micro.samples))
                positions.extend(range(seen + micro.start, seen + micro.start + micro.samples))
            seen += micro.step_samples * micro.last
    return gather_outputs(local, positions, mesh.device)


def _unwrap_output(outputs: Any) -> Any:
    """The logits of a Hugging Face output."""
    inner = None if isinstance(outputs, (Tensor, tuple, list)) else outputs_in(outputs)
    return outputs if inner is None else inner


class EvaluationVerdict(NamedTuple):
    record: Record  # rank 0's
    reason: str | None  # why training should end, if it should
    is_best: bool  # so far


class EvaluationPolicy:
    def __init__(self, config: Config, rates: LearningRate, position: TrainProgress) -> None:
        self._config, self._rates, self._position = config, rates, position
        best, stop = config.save_best, config.early_stop
        self.best = None if best is None else Best(best.metric, best.mode)
        self.stop = None if stop is None else Best(stop.metric, stop.mode, stop.min_delta)
        self._waited, self._tried = 0, False

    def try_once(self, sets: Mapping[str, Any], measure: Callable[..., Mapping[str, float]]) -> None:
        """Call before the first step: what is wrong with validation data or metrics would show after an epoch."""
        read_once = any(isinstance(getattr(each, "source", each), Iterator) for each in sets.values())
        if sets and not read_once and not self._tried and self._config.preflight:
            self._tried = True
            self._require_metrics(measure(sets, _first_step))

    def require_evaluations(self, has_val_data: bool) -> None:
        wanted = [name for name in ("save_best", "early_stop") if getattr(self._config, name) is not None]
        wanted += ["schedule: plateau"] if self._config.schedule.name == "plateau" else []
        if wanted and not has_val_data:
            raise TrainError(
                "no-evaluation",
                f"{wanted[0]} requires validation data.",
                fix="pass it: trainer.train(data, val_data, …)",
            )

    def apply(self, record: Record, due: bool = True) -> EvaluationVerdict:
        """An evaluation that was not due (at the end of a train() call) may be the best so far, but affects neither the
        learning rate nor early stop."""
        record = collectives.broadcast_object(record)
        self._require_metrics(record)
        reason = None
        if due:
            self._rates.evaluated(record)
            reason = self._early_stop(record)
            self._position.evaluated = record["step"]
        settings = self._config.save_best
        best = self.best is not None and settings is not None and self.best.improved(record[settings.metric])
        return EvaluationVerdict(record, reason, best)

    def _early_stop(self, record: Record) -> str | None:
        settings = self._config.early_stop
        if settings is None or self.stop is None:
            return None
        self._waited = 0 if self.stop.improved(record[settings.metric]) else self._waited + 1
        if self._waited < settings.patience:
            return None
        return f"{settings.metric} has not improved in {self._waited} evaluations (early_stop)"

    def _require_metrics(self, record: Mapping[str, Any]) -> None:
        config = self._config
        wanted = [section.metric for section in (config.save_best, config.early_stop) if section is not None]
        wanted += [config.schedule.metric] if config.schedule.name == "plateau" else []
        missing = [name for name in wanted if name not in record]
        if missing:
            known = [name for name in record if name not in ("step", "epoch")]
            raise TrainError("no-such-metric", f"Unknown metric {missing[0]!r}; the evaluation has {', '.join(known)}.")

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": None if self.best is None else self.best.state_dict(),
            "stop": None if self.stop is None else self.stop.state_dict(),
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for tracker, name in ((self.best, "best"), (self.stop, "stop")):
            if tracker is not None and state[name] is not None:
                tracker.load_state_dict(state[name])
        self._waited = state["waited"]
