"""Names random numbers that a forward draws from the generators of its rank, so that the loss depends on the layout.

Dropout and `paceline.noise` are computed by sample. Whether anything else is drawn shows in the generators after the
first micro-batch. Only then are two more forwards run: the second one is recorded, because models may initialize
something in their first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.data.loader import MicroBatch
from paceline.guard import snapshot
from paceline.guard.kept_state import trial_loss
from paceline.models.loss_module import LossModule
from paceline.monitor.random_calls import RandomCalls
from paceline.parallel.fsdp import reshard_all
from paceline.runtime import collectives
from paceline.runtime.noise import NoiseContext

_SHOWN = 4
_ADVICE = (
    "random numbers: {} are drawn from the generator of a rank, so the loss depends on the number of ranks. Dropout is "
    "computed by sample if its first dim is the samples, or a multiple of them; for other numbers, use "
    "paceline.noise(like)"
)


def describe_draws(
    module: LossModule,
    run: Callable[[Any], Any],
    micro: MicroBatch,
    draw: NoiseContext,
    user_code: Sequence[Any],
    *,
    pipelined: bool = False,
) -> str | None:
    """What is not computed by sample, after a first micro-batch. Collective. `run` computes the loss of a batch."""
    keys = draw.keys
    if keys is None or not any(collectives.all_gather_object(bool(keys.drawn))):
        return None
    calls = [f"{what} of shape {shape}" for what, shape in keys.kept.items()]
    if not pipelined:  # there, a trial does not know the samples of each part of a batch
        recorder = RandomCalls(keys)
        with (
            snapshot.preserved(module.model, *user_code),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            draw.copy() as trial,
        ):
            trial_loss(run, micro, trial)
            trial_loss(partial(recorder.record, run), micro, trial)
        reshard_all(module)
        calls = recorder.found
    found = sorted({call for rank in collectives.all_gather_object(calls) for call in rank})
    return _ADVICE.format("; ".join(found[:_SHOWN]) + ("; …" if len(found) > _SHOWN else "")) if found else None
