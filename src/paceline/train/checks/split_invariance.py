"""Compares the loss of a batch with those of its halves: before the first step, and now and then later.

If the loss of a batch is not the weighted mean of the losses of its slices, it depends on the number of ranks and
micro-batches: a mean over something other than samples, a sum, a loss across samples, or a batch whose first dim is not
its samples. Nothing can be done about it here, so it is a warning.

The model runs in training mode, in which it may couple samples as well; uncompiled, in full precision where possible,
and each time from the same state and random state. If that shows a difference, or nothing because the loss is random,
it runs in eval mode. Ranks run equally many. A loss that could be computed in neither mode is named, with the
exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import isclose, isfinite, isnan
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.data.batches import apply, layout_of, rows_of, samples_in, tensors_in
from paceline.data.loader import MicroBatch
from paceline.errors import DataError, LayoutError, TrainError
from paceline.models.divisor import divisor_of, means_of, weighted_mean
from paceline.models.loss_module import LossModule
from paceline.models.model_call import read_loss
from paceline.models.usage_errors import Broadcasts
from paceline.parallel.compile import uncompiled
from paceline.parallel.fsdp import reshard_all
from paceline.parallel.split import contexts_in
from paceline.runtime import collectives, rng
from paceline.runtime.noise import NoiseContext
from paceline.train.checks import snapshot

_TOLERANCES = {torch.float64: 5e-7, torch.float32: 5e-5}  # `1 / count` is float32 in a model of float64, too
_HALF = 2e-2
_SMALL = 1e-2  # losses are compared as if they were at least this
_JOINED = 4  # samples, if micro-batches have fewer

_CAUSES = (
    "if it is a mean over something other than samples, or a sum, return paceline.Loss(sum, weight). If it couples "
    "samples (a contrastive loss, statistics of the batch), it is computed for each micro-batch separately, unless it "
    "gathers those of all ranks by paceline.dist.all_gather_rows. If output and target have different shapes, they "
    "broadcast: make them equal. If the first dim of the batch is not its samples, change the collate function"
)
GATHERS = "the loss gathers what other ranks compute: its slices are not compared, but paceline parity compares it"
NEEDS_GRAPH = "the loss is computed only with gradients: its slices are not compared, but paceline parity compares it"
_IN_TRAINING = (
    "In eval mode it does not: if the model couples samples in training, it does so per micro-batch. If the first dim "
    "of a dropout is a multiple of the samples, but not the samples (as tokens may be), put the samples first"
)


class Sum(NamedTuple):
    """The sum of a loss, its weight, and what the means in it were divided by."""

    value: float
    weight: float
    counts: tuple[float, ...] = ()


class LossTrial(NamedTuple):
    """What runs the loss of a batch once more. `run` computes it, on the ranks that have it, with a graph."""

    module: LossModule
    run: Callable[[Any], Any]
    micro: MicroBatch
    draw: NoiseContext
    user_code: Sequence[Any]


def compare(
    trial: LossTrial, *, replicated: bool, partner: MicroBatch | None, training: bool, several: bool
) -> str | None:
    """Return a warning, `GATHERS`, `NEEDS_GRAPH`, or None. Collective. `partner`: another micro-batch, to be joined.
    `training`: whether losses can be compared in training mode; `several`: of micro-batches a step."""
    text = error = None
    if training:
        text, error, judged = _compare(trial, replicated, partner, training=True)
        if text is None and judged:
            return None
        if error == NEEDS_GRAPH:
            return error
    found, failed, _ = _compare(trial, replicated, partner, training=False)
    found = found or text
    if found and found.startswith("[train.loss-of-slices]") and replicated and not several and _gathers(trial):
        return GATHERS
    return found or error or failed


def _gathers(trial: LossTrial) -> bool:
    """Whether the loss of rank 0 has a gradient on other ranks, because it gathers what they compute. In eval mode, as
    batch norm gathers statistics. Collective."""
    found: list[bool] = []

    def run(batch: Any) -> Any:
        result = trial.run(batch)
        trained = [each for each in trial.module.parameters() if each.requires_grad]
        value = read_loss(result)[0]
        first = torch.full_like(value, collectives.rank() == 0)
        gradients = torch.autograd.grad(value, trained, first, retain_graph=True, allow_unused=True)
        found.append(collectives.rank() > 0 and any(each is not None and bool(each.any()) for each in gradients))
        return result

    with snapshot.preserved(trial.module.model, *trial.user_code), trial_mode(trial.module, True, training=False):
        _loss(trial._replace(run=run), [], None, None)
    return any(any(each) for each in collectives.all_gather_object(found))


def _compare(
    trial: LossTrial, replicated: bool, partner: MicroBatch | None, *, training: bool
) -> tuple[str | None, str | None, bool]:
    """A difference, an error, and whether the loss was computed and is not random."""
    module, micro = trial.module, trial.micro
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    if any(part.running_mean is None for part in norms):
        return None, None, True  # a loss across samples, by intention
    own, micro = micro.samples, joined(micro, partner)
    trial = trial._replace(micro=micro)
    known = layout_of(micro.batch) if micro.samples > 1 else None
    judges = known is not None and known[0] == micro.samples
    sizes = [each for each in collectives.all_gather_object((own, micro.samples) if judges else None) if each]
    if not sizes:
        return None, None, True
    own, samples = (min(each) for each in zip(*sizes, strict=True))
    cuts = sorted({0, own // 2, own, samples} if own > 1 else {0, samples // 2, samples})
    spans = [(0, samples), *pairwise(cuts)] if judges else [None] * len(cuts)
    failed: list[str] = []
    reshard_all(module)
    with (
        snapshot.preserved(module.model, *trial.user_code) as restore,
        trial_mode(module, replicated, training) as tolerance,
        Broadcasts(module.call and module.call.criterion) as mixed,
    ):

        def begin() -> None:
            """Undo the forward before."""
            reshard_all(module)  # an RNN keeps its parameters in a list as well, which is restored
            restore()
            for norm in norms:
                norm.eval()  # what they couple is synchronized

        one = partial(_loss, trial, failed, begin if training else None)
        batch, *parts = (one(span) for span in spans)
        differs = mixed.found is not None or (judges and not _adds_up(batch, parts, tolerance))
        text = _describe(failed, lacks_graph=batch is None and training and not replicated)
        ranks, is_random = collectives.all_gather_object((differs, text)), False
        if any(rank[0] for rank in ranks):
            again = one(spans[0], torch.initial_seed() ^ 1)
            is_random = again is None or not _adds_up(batch, [again], tolerance)
    half = parts[0]
    if batch and half and len(batch.counts) == len(half.counts):
        module.proportions.over_samples = [a > b for a, b in zip(batch.counts, half.counts, strict=True)]
    error = next((text for _, text in ranks if text), None)
    if not any(rank[0] for rank in ranks):
        return None, error, error is None
    found = mixed.found and f"loss: {mixed.found}"
    known_parts = [part for part in parts if part]
    if found is None and differs and not is_random and batch:
        total, weights = sum(part.value for part in known_parts), [part.weight for part in known_parts]
        found = TrainError(
            "loss-of-slices",
            f"The loss of {samples} samples is {batch.value / batch.weight:.6g}, but {total / sum(weights):.6g} from "
            f"its slices, of weights {' and '.join(f'{each:g}' for each in weights)}.",
            why="so it depends on the number of ranks and micro-batches",
            fix=_IN_TRAINING if training else _CAUSES,
        ).text()
    ranks = collectives.all_gather_object((found, is_random))
    judged = error is None and not any(rank[1] for rank in ranks)
    return next((text for text, _ in ranks if text), None), error, judged


def joined(micro: MicroBatch, partner: MicroBatch | None) -> MicroBatch:
    """With half as many samples of another micro-batch, which may differ more than the halves of one: masks may lie in
    the slices of some ranks only. A single sample is joined to several; without others, to a copy of itself."""
    count = micro.samples
    if count == 1 and (partner is None or not partner.samples):
        partner = micro
    if not count or partner is None or not partner.samples:
        return micro
    try:
        taken = rows_of(partner.batch, 0, min(partner.samples, max(count // 2, _JOINED - count)))
        ours, others = ([*tensors_in(each)] for each in (micro.batch, taken))
    except DataError:  # whose samples are unclear
        return micro
    if [(each.shape[1:], each.dtype) for each in ours] != [(each.shape[1:], each.dtype) for each in others]:
        return micro
    rest = iter(others)
    batch = apply(micro.batch, lambda own: torch.cat([own, next(rest)]) if own.dim() else next(rest))
    samples = count + (samples_in(taken) if others else 0)
    if layout_of(batch) != (samples, "parts"):  # it has lists of samples
        return micro
    return replace(micro, batch=batch, samples=samples, step_samples=micro.step_samples + samples - count)


def _describe(failed: Sequence[str], *, lacks_graph: bool) -> str | None:
    """`lacks_graph`: the whole batch has failed, as it did not in training, where no trial has a graph."""
    if not failed:
        return None
    return NEEDS_GRAPH if lacks_graph else not_checked("whether the loss depends on how a batch is sliced", failed[0])


def not_checked(what: str, error: str) -> str:
    """The warning for a check that failed itself."""
    return TrainError("not-checked", f"Checking {what} failed: {error}.").text()


def is_failure(warning: str) -> bool:
    return warning.startswith("[train.not-checked]")


@contextmanager
def trial_mode(module: LossModule, replicated: bool, training: bool = True) -> Iterator[float]:
    """Yields the relative tolerance of a loss."""
    before, context = module.training, module.context
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    is_half = any(isinstance(each, torch.autocast) for each in contexts_in(context))
    if is_half and replicated:  # FSDP gathers parameters in half precision
        module.context, is_half = None, False
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    tolerance = _HALF if is_half else max((_TOLERANCES.get(dtype, _HALF) for dtype in dtypes), default=_HALF)
    if not training:
        module.eval()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.no_grad(), uncompiled():
            yield tolerance
    finally:
        reshard_all(module)
        module.training, module.context = before, context
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32


def _loss(
    trial: LossTrial,
    failed: list[str],
    begin: Callable[[], None] | None,
    span: tuple[int, int] | None,
    seed: int | None = None,
) -> Sum | None:
    module, run, micro, draw, _ = trial
    start, stop = span or (0, micro.samples)
    if begin is not None:
        begin()
    draw.begin(micro)
    try:
        rows = micro.batch if span is None else rows_of(micro.batch, start, stop)
        with rng.preserve_rng_state(), draw.select(start, stop - start):
            if seed is not None:
                rng.seed_everything(seed)
            result = run(snapshot.copied(rows))
        if result is None:  # not on this stage of a pipeline
            return None
        value, weight, _ = read_loss(result)
        module.has_weights = weight is not None
        counts = () if weight is not None else tuple(float(mean.divisor) for mean in means_of(value))
        if weight is None:
            if module.divides and divisor_of(value) is None:  # another loss than in training
                return None
            value, weight = weighted_mean(value, stop - start, divides=module.divides)
        return Sum(float(value), float(weight), counts)
    except LayoutError:  # ranks ran different modules, and do not wait for each other in the same places
        raise
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")
        return None
    finally:
        draw.end()


def _adds_up(batch: Sum | None, parts: Sequence[Sum | None], tolerance: float) -> bool:
    if batch is None or None in parts or not all(map(isfinite, batch[:2])):
        return True  # not judged
    value, weight = sum(part.value for part in parts if part), sum(part.weight for part in parts if part)
    if isnan(value):  # 0/0 where all is masked
        return False
    if not (isfinite(value) and isfinite(weight) and batch.weight and weight):
        return True
    largest = max(abs(batch.value), sum(abs(part.value) for part in parts if part), _SMALL * abs(batch.weight))
    return isclose(batch.weight, weight, rel_tol=tolerance) and abs(batch.value - value) <= tolerance * largest
