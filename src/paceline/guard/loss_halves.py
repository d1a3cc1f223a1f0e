"""Compares the loss of a batch with those of its halves, before the first step.

If the loss of a batch is not the weighted mean of the losses of its slices, it depends on the number of ranks and
micro-batches: a mean over something other than samples, a sum, a loss across samples, or a batch whose first dim is not
its samples. Nothing can be done about it here, so it is a warning.

The model runs in eval mode (with dropout by sample, in training mode too), uncompiled, without gradients and in full
precision where possible. A loss that is random is not judged, nor is one whose halves fail. Ranks run equally many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isclose, isfinite
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.data.batches import apply, layout_of, rows_of
from paceline.data.loader import MicroBatch
from paceline.errors import LayoutError
from paceline.guard import snapshot
from paceline.models.divisor import LossGraph, divisor_of, weighted_mean
from paceline.models.loss_module import LossModule
from paceline.models.model_call import read_loss
from paceline.models.usage_errors import Broadcasts
from paceline.parallel.fsdp import reshard_all
from paceline.runtime import collectives
from paceline.runtime.noise import NoiseContext

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 5e-5}
_HALF = 2e-2
_SMALL = 1e-2  # losses are compared as if they were at least this

_CAUSES = (
    "If it is a mean over something other than samples, or a sum, return paceline.Loss(sum, weight). If it couples "
    "samples (a contrastive loss, statistics of the batch), it is computed for each micro-batch separately. If output "
    "and target have different shapes, they broadcast: make them equal. If the first dim of the batch is not its "
    "samples, change the collate function"
)
_IN_TRAINING = (
    "In eval mode it does not. If the first dim of a dropout is a multiple of the samples, but not the samples (as "
    "tokens may be), put the samples first. If the model couples samples in training, it does so per micro-batch"
)
Sum = tuple[float, float]  # the sum of a loss and its weight


def compare(
    module: LossModule,
    run: Callable[[Any], Any],
    micro: MicroBatch,
    draw: NoiseContext,
    user_code: Sequence[Any],
    *,
    replicated: bool,
    training: bool = False,
    twice: bool = False,
) -> str | None:
    """Return a warning, or None. Collective. `run` computes the loss of a batch, on the ranks that have it. `training`:
    in training mode. `twice`: micro-batches are of one sample, and a pair of copies is compared."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    if any(part.running_mean is None or (training and part.training) for part in norms):
        return None  # a loss across samples, by intention
    if training and not all(collectives.all_gather_object(draw.keys is not None and draw.keys.covers_all)):
        return None
    known = layout_of(micro.batch) if micro.samples > 1 else None
    judges = known is not None and known[0] == micro.samples
    sizes = collectives.all_gather_object(micro.samples if judges else 0)
    samples = min((size for size in sizes if size), default=0)
    if not samples:
        if twice:
            return None
        doubled = apply(micro.batch, lambda tensor: torch.cat([tensor, tensor]) if tensor.shape[:1] == (1,) else tensor)
        pair = replace(micro, batch=doubled, samples=2 * micro.samples)
        return compare(module, run, pair, draw, user_code, replicated=replicated, training=training, twice=True)
    spans = [(0, samples), (0, samples // 2), (samples // 2, samples)]
    with (
        snapshot.preserved(module.model, *user_code),
        _trial_mode(module, replicated, training) as tolerance,
        Broadcasts(module.call and module.call.criterion) as mixed,
    ):
        batch, half, rest = (_loss(module, run, micro, span if judges else None, draw) for span in spans)
        differs = mixed.found is not None or (judges and not _adds_up(batch, half, rest, tolerance))
        if not any(collectives.all_gather_object(differs)):
            return None
        torch.manual_seed(torch.initial_seed() ^ 1)
        again = _loss(module, run, micro, spans[0] if judges else None, draw)
        is_random = again is None or not _adds_up(batch, again, (0.0, 0.0), tolerance)
    text = mixed.found
    if text is None and differs and not is_random and batch and half and rest:
        total, weight = half[0] + rest[0], half[1] + rest[1]
        text = (
            f"the loss of {samples} samples is {batch[0] / batch[1]:.6g}, but {total / weight:.6g} from its halves, "
            f"of weights {half[1]:g} and {rest[1]:g}: it depends on the number of ranks and micro-batches. "
            f"{_IN_TRAINING if training else _CAUSES}"
        )
    return next((found for found in collectives.all_gather_object(text) if found), None)


@contextmanager
def _trial_mode(module: LossModule, replicated: bool, training: bool) -> Iterator[float]:
    """Yields the relative tolerance of a loss."""
    before, context = module.training, module.context
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    is_half = isinstance(context, torch.autocast)
    if is_half and replicated:  # FSDP gathers parameters in half precision
        module.context, is_half = None, False
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    tolerance = _HALF if is_half else max((_TOLERANCES.get(dtype, _HALF) for dtype in dtypes), default=_HALF)
    if not training:
        module.eval()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield tolerance
    finally:
        reshard_all(module)
        module.training, module.context = before, context
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32


def _loss(
    module: LossModule, run: Callable[[Any], Any], micro: MicroBatch, span: tuple[int, int] | None, draw: NoiseContext
) -> Sum | None:
    start, stop = span or (0, micro.samples)
    draw.begin(micro)
    try:
        rows = micro.batch if span is None else rows_of(micro.batch, start, stop)
        with draw.select(start, stop - start), LossGraph():
            result = run(snapshot.copied(rows))
        if result is None:  # not on this stage of a pipeline
            return None
        value, weight, _ = read_loss(result)
        module.has_weights = weight is not None
        if weight is None:
            if module.divides and divisor_of(value) is None:  # another loss than in training
                return None
            value, weight = weighted_mean(value, stop - start, divides=module.divides)
        return float(value), float(weight)
    except LayoutError:  # ranks ran different modules, and do not wait for each other in the same places
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("the loss of samples %d to %d was not compared: %r", start, stop, error)
        return None
    finally:
        draw.end()


def _adds_up(batch: Sum | None, half: Sum | None, rest: Sum | None, tolerance: float) -> bool:
    if batch is None or half is None or rest is None or not all(map(isfinite, (*batch, *half, *rest))):
        return True  # not judged
    if not batch[1] or not (half[1] or rest[1]):
        return True
    largest = max(abs(batch[0]), abs(half[0]) + abs(rest[0]), _SMALL * abs(batch[1]))
    weights_add_up = isclose(batch[1], half[1] + rest[1], rel_tol=tolerance)
    return weights_add_up and abs(batch[0] - half[0] - rest[0]) <= tolerance * largest
