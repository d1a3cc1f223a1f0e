"""Names random numbers that a forward draws from the generators of its rank, so that the loss depends on the layout.

Dropout and `paceline.noise` are computed by sample. Whether anything else is drawn shows in the generators after the
first micro-batch. Only then are more forwards run. The second is recorded: a first may initialize something. The others
show whether the numbers matter: some models ignore what they draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isclose
from typing import Any

import torch

from paceline.data.loader import MicroBatch
from paceline.guard import snapshot
from paceline.guard.kept_state import TOLERANCE, trial_loss
from paceline.models.loss_module import LossModule
from paceline.monitor.random_calls import RandomCalls
from paceline.parallel.fsdp import reshard_all
from paceline.runtime import collectives, rng
from paceline.runtime.noise import NoiseContext
from paceline.runtime.sample_keys import SampleKeys

_Run = Callable[[Any], Any]
_SHOWN = 4
_ADVICE = (
    "random numbers: {} are drawn from the generator of a rank, so the loss depends on the number of ranks. Dropout is "
    "computed by sample where the first dim is the samples; for noise, use paceline.noise(like)"
)


def describe_draws(
    module: LossModule, run: _Run, micro: MicroBatch, draw: NoiseContext, code: Sequence[Any], *, pipelined: bool
) -> str | None:
    """What is not computed by sample, after a first micro-batch. Collective. `run` computes the loss of a batch."""
    keys = draw.keys
    if keys is None or not any(collectives.all_gather_object(bool(keys.drawn))):
        return None
    calls = [f"{what} of shape {shape}" for what, shape in keys.kept.items()]
    if not pipelined:  # there, a trial does not know the samples of each part of a batch
        recorder = RandomCalls(keys)
        with (
            snapshot.preserved(module.model, *code),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            draw.copy() as trial,
        ):
            trial_loss(run, micro, trial)
            first = trial_loss(partial(_seeded, 0, partial(recorder.record, run), keys), micro, trial)
            others = [trial_loss(partial(_seeded, seed, run, keys), micro, trial) for seed in range(1, 8)]
        reshard_all(module)
        calls = [] if all(isclose(first, other, rel_tol=TOLERANCE) for other in others) else recorder.found
    found = sorted({call for rank in collectives.all_gather_object(calls) for call in rank})
    return _ADVICE.format("; ".join(found[:_SHOWN]) + ("; …" if len(found) > _SHOWN else "")) if found else None


def _seeded(seed: int, run: _Run, keys: SampleKeys, batch: Any) -> Any:
    rng.seed_everything(0 if keys.fused_attention else seed)  # its masks are known to matter
    rng.seed_cpu(seed)
    return run(batch)
