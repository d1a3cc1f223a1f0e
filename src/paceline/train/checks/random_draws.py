"""Names random numbers that a forward draws from the generators of its rank, so that the loss depends on the layout.

Dropout and `paceline.noise` are computed by sample. Whether anything else is drawn shows in the generators after the
first micro-batch. Only then are more forwards run. The second is recorded: a first may initialize something. The others
show whether the numbers matter: some models ignore what they draw. If no two of them have the same loss, on any rank,
there is no use in comparing it with those of slices, which draw other numbers.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import isclose
from pathlib import Path
from struct import unpack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.data.batches import tensors_in
from paceline.data.loader import MicroBatch
from paceline.log import Log
from paceline.run.user_frame import UserFrame
from paceline.runtime import collectives, rng
from paceline.runtime.generator_states import find_marks, split_marks
from paceline.runtime.noise import NoiseContext
from paceline.runtime.rng import drawn_between, positions
from paceline.runtime.sample_keys import SampleKeys
from paceline.train.checks import snapshot
from paceline.train.checks.forward_changes import TOLERANCE, trial_loss
from paceline.train.checks.split_invariance import LossTrial, not_checked, trial_mode

_Run = Callable[[Any], Any]
_Describe = Callable[[MicroBatch], tuple[str | None, bool]]
_SHOWN = 4
_GENERATORS = ("Python's random", "numpy.random", "numbers of torch's generator")  # as in `marks_now`
_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
_RECURRENT = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_ADVICE = (
    "random numbers: {} are drawn from the generator of a rank, so the loss depends on the number of ranks. Dropout is "
    "computed by sample where the first dim is the samples; for noise, use paceline.noise(like)"
)


class LateDraws:
    """Finds numbers that are drawn from a later step on: two looks at the generators for each micro-batch.

    What the first check found to have no effect, such as noise of strength zero, is checked again as training goes on.
    Otherwise one process finds the calls and whether they matter. With several ranks, each of them speaks for itself:
    a shape, and so what is drawn, may be that of one rank.
    """

    def __init__(self, draw: NoiseContext, describe: _Describe, say: Callable[[str], None], log: Log) -> None:
        """`say`: called on all ranks with what they found together."""
        assert draw.keys is not None
        self._draw, self._keys, self._describe, self._say = draw, draw.keys, describe, say
        self._log = Log(collectives.rank(), every_rank=True, stream="stdout")
        self._log.on_warning = log.on_warning
        self._known: set[tuple[int, ...]] = set()  # numbers of words that were drawn without effect
        self.checks_again = any(collectives.all_gather_object(bool(self._keys.drawn)))
        self._learns = bool(self._keys.drawn)
        self._epoch = self._step = 0  # of the last check
        find_marks()

    def __call__(self, micro: MicroBatch, before: bytes, after: bytes) -> None:
        words = tuple(_words(*pair) for pair in zip(split_marks(before), split_marks(after), strict=True))
        begins = any(words) and words not in self._known and not self._learns
        if any(words):
            self._learns = False
            self._known.add(words)
        if begins and collectives.world() > 1:
            self._draw.watch = None
            self._log.warning(self._explain(micro, words))
        elif begins or (self.checks_again and self._is_due(micro)):
            self._keys.drawn, self.checks_again = self._keys.drawn or ["drawn"], True
            if text := self._describe(micro)[0]:
                self._draw.watch = None
                self._say(text)

    def _is_due(self, micro: MicroBatch) -> bool:
        """At powers of two, and at the beginning of an epoch, for what a callback changes there. Equal on all ranks."""
        step, since = micro.step, micro.step - self._step
        due = since > 0 and (step & (step - 1) == 0 or (micro.epoch != self._epoch and 8 * since >= step))
        self._epoch = micro.epoch
        if due:
            self._step = step
        return due

    def _explain(self, micro: MicroBatch, words: tuple[int, ...]) -> str:
        names = [name for name, count in zip(_GENERATORS, words, strict=True) if count]
        calls = [f"{what} of shape {shape}" for what, shape in self._keys.kept.items()] or names
        found = f"{_ADVICE.format('; '.join(calls))}. It began in step {micro.step + 1}"
        return f"{found}, on rank {collectives.rank()} at least; on one rank, paceline names the line"


def _words(before: bytes, after: bytes) -> int:
    """How many words of a Mersenne Twister were drawn, modulo 624; 625 if that is zero."""
    if before == after:
        return 0
    changes = [(b - a) % 624 for a, b in zip(unpack("5I", before), unpack("5I", after), strict=True)]
    return changes[0] or changes[-1] or 625


def describe_draws(trial: LossTrial, *, pipelined: bool) -> tuple[str | None, bool]:
    """What is not computed by sample, after a first micro-batch, and whether any two draws give different losses on
    every rank. Collective."""
    keys, is_random = trial.draw.keys, False
    if keys is None or not any(collectives.all_gather_object(bool(keys.drawn))):
        return None, False
    calls, failed = [f"{what} of shape {shape}" for what, shape in keys.kept.items()], list[str]()
    if not pipelined:  # there, a trial does not know the samples of each part of a batch
        recorder, preserved = RandomCalls(keys), snapshot.preserved(trial.module.model, *trial.user_code)
        with preserved, trial_mode(trial.module, replicated=False) as rounding, trial.draw.copy() as draw:
            trial = trial._replace(draw=draw)
            trial_loss(trial, failed)
            runs: list[_Run] = [partial(recorder.record, trial.run), *[trial.run] * 7]
            seeded = [trial._replace(run=partial(_seeded, seed, run, keys)) for seed, run in enumerate(runs)]
            first, *others = [trial_loss(each, failed) for each in seeded]
        calls = [] if all(isclose(first, other, rel_tol=TOLERANCE) for other in others) else recorder.found
        is_random = all(b - a > rounding * max(abs(a), abs(b)) for a, b in pairwise(sorted([first, *others])))
    ranks = collectives.all_gather_object((calls, failed, is_random))
    if errors := [error for _, texts, _ in ranks for error in texts]:
        return not_checked("random numbers", errors[0]), False
    found = sorted({call for rank, _, _ in ranks for call in rank})
    text = _ADVICE.format("; ".join(found[:_SHOWN]) + ("; …" if len(found) > _SHOWN else "")) if found else None
    return text, all(each for _, _, each in ranks)


def _seeded(seed: int, run: _Run, keys: SampleKeys, batch: Any) -> Any:
    rng.seed_everything(0 if keys.fused_attention else seed)  # its masks are known to matter
    rng.seed_cpu(seed)
    return run(batch)


class RandomCalls(TorchFunctionMode):
    """Records calls that draw from the global generators, with their lines."""

    def __init__(self, keys: SampleKeys) -> None:
        super().__init__()
        self._keys, self.found = keys, list[str]()

    def record(self, function: Callable[[Any], Any], argument: Any) -> Any:
        self._before = positions()
        with self:
            result = function(argument)
        self._note_others()
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_others()
        fused, self._keys.fused_attention = self._keys.fused_attention, False
        result = func(*args, **(kwargs or {}))
        after = positions()
        if drawn_between(self._before, after) and not self._keys.fused_attention:  # which is known
            kind = _RECURRENT.get(func.__name__)
            shapes = [f" of shape {tuple(tensor.shape)}" for tensor in tensors_in(result)]
            self.found.append((f"nn.{kind}(dropout=…)" if kind else func.__name__ + "".join(shapes[:1])) + _place())
        self._before, self._keys.fused_attention = after, self._keys.fused_attention or fused
        return result

    def _note_others(self) -> None:  # draws since the last function of torch
        before, self._before = self._before, positions()
        self.found += drawn_between(before, self._before)


def _place() -> str:
    """The innermost line outside of torch and paceline, within the recorded function."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if code is RandomCalls.record.__code__:
            break
        if not code.co_filename.startswith(_LIBRARIES):
            source = linecache.getline(code.co_filename, line).strip()
            return f" ({UserFrame(code.co_filename.rpartition('site-packages/')[2], line, code.co_name, source)})"
    return ""
