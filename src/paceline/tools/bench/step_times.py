"""Where the time of a training step goes.

    trainer = TimedTrainer.from_config(config)
    trainer.train(data, max_steps=50)
    trainer.times.steps()          # [{"data": 0.0001, "forward": 0.004, …}, …], in seconds

The Trainer and its loop are the real ones. Their parts are wrapped from outside, once, when training begins: each
wrapper notes the time before and after its call, so that all time between two notes belongs to exactly one part, and
the parts of a step add up to it. On a GPU the notes are CUDA events in the stream of the computation: a part is the
time that the stream spends on it, or waits for the host in it.

Communication means the time that the step waits for it, which is what it costs. With DDP this is the time between the
end of the gradient computation and the end of the backward, when all buckets are reduced: a callback of autograd, which
is queued before that of DDP, marks the first of the two. It includes waiting for slower ranks; on the last rank to
arrive it is communication alone. Buckets that are reduced while gradients are computed cost nothing here, though on a
busy CPU they slow the backward down. FSDP, tensor and pipeline parallelism communicate inside forward and backward,
where it can't be told from the computation: there it is part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.data.loader import MicroBatch
from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.tools.bench import step_report
from paceline.train import loop
from paceline.train.engine import Engine
from paceline.train.hooks import Hooks
from paceline.train.pipeline_step import PipelineStep
from paceline.train.trainer import Trainer

_END, _APART = "end", "apart"  # of a step; of no step


class StepTimes:
    """Notes of time on one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.align: Callable[[], object] | None = None  # called between steps, outside their time
        self._notes: list[tuple[str, Any]] = []
        self._ready: list[tuple[Any, int]] = []  # buckets of this step: when, bytes
        self._buckets: list[tuple[Any, list[tuple[Any, int]]]] = []  # of each step, with the end of its gradients

    def note(self, part: str) -> None:
        """The time since the last note belongs to `part`."""
        self._notes.append((part, self._now()))

    def bucket_ready(self, size: int) -> None:
        """DDP would begin to reduce a bucket now."""
        self._ready.append((self._now(), size))

    def gradients_complete(self) -> None:
        self.note(step_report.BACKWARD)
        self._buckets.append((self._notes[-1][1], self._ready))
        self._ready = []

    def ended(self) -> None:
        """A step ended with the last note."""
        self._notes.append((_END, self._notes[-1][1]))
        if self.align is not None:
            self.align()
            self.note(_APART)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def buckets(self, skip: int) -> list[tuple[float, int]]:
        """Of each bucket, the seconds from when it is ready until the gradients are complete (the median over all but
        the first `skip` steps), and its bytes."""
        steps = [[(_seconds(when, end), size) for when, size in ready] for end, ready in self._buckets[skip:]]
        return [(median(lead for lead, _ in same), same[0][1]) for same in zip(*steps, strict=False)]

    def steps(self) -> list[dict[str, float]]:
        """The seconds of each complete step, by part."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: list[dict[str, float]] = []
        step: dict[str, float] = {}
        for (_, before), (part, now) in pairwise(self._notes):
            if part == _END:
                found.append(step)
                step = {}
            elif part != _APART:
                step[part] = step.get(part, 0.0) + _seconds(before, now)
        return found


def _seconds(before: Any, now: Any) -> float:
    return float(now - before if isinstance(now, float) else before.elapsed_time(now) / 1e3)


class TimedTrainer(Trainer):
    """A Trainer that notes where the time of its steps goes."""

    times: StepTimes
    align: Callable[[], object] | None = None

    def _job(self, *arguments: Any, **named: Any) -> loop.Job:
        job = super()._job(*arguments, **named)
        self.times = StepTimes(self.world.device)
        self.times.align = self.align
        watch(job, self.times)
        return job


def watch(job: loop.Job, times: StepTimes) -> None:
    """Note what happens between the calls of the loop and, unless a graph captures the step, within it."""
    engine, micros = job.engine, job.micros
    if engine.hooks.captured is not None:
        within, complete = Hooks(name="bench"), step_report.GRAPH
    elif isinstance(engine.stepper, PipelineStep):
        within, complete = _hooks(engine, times, step_report.BOTH), step_report.OPTIMIZER
    else:
        within, complete = _hooks(engine, times, step_report.BACKWARD), step_report.OPTIMIZER
    engine.hooks.set(replace(within, after_step=lambda *_: times.note(complete)))
    job.micros = lambda: _read(micros(), times)
    _wrap(job.actions, "run_due", times, step_report.LOGGING)
    if engine.features.local_steps is not None:
        _wrap(engine.features.local_steps, "after_step", times, step_report.ROUND, before=step_report.OPTIMIZER)


def _hooks(engine: Engine, times: StepTimes, work: str) -> Hooks:
    """`work`: what ends with a backward. That of DDP ends with communication."""
    reduces, weights = isinstance(engine.parts.forward, DynamicDDP), engine.stepper.weights
    exchange = step_report.COMMUNICATION if engine.config.fixed_order else step_report.OTHER  # of slices

    def before_backward(micro: MicroBatch, value: Tensor) -> None:
        times.note(step_report.FORWARD)
        if reduces and micro.last:
            value.register_hook(complete)

    def complete(gradient: Tensor) -> None:
        # Called at the beginning of the backward. Callbacks run in the order in which they are queued, after the last
        # gradient; the one of DDP, which waits for its buckets, is queued when the last bucket is full.
        torch.autograd.Variable._execution_engine.queue_callback(times.gradients_complete)

    def after_backward(micro: MicroBatch) -> None:
        times.note(step_report.COMMUNICATION if reduces and micro.last else work)

    return Hooks(
        name="bench",
        before_forward=lambda _: times.note(step_report.OTHER),
        before_backward=before_backward,
        after_backward=after_backward,
        on_losses=lambda _: times.note(exchange),
        # It has waited for the weights of all ranks.
        on_reduced=lambda _: times.note(step_report.COMMUNICATION if weights.data_weighted else step_report.OTHER),
    )


def _read(micros: Iterator[MicroBatch], times: StepTimes) -> Iterator[MicroBatch]:
    times.note(step_report.OTHER)
    while True:
        micro = next(micros, None)
        times.note(step_report.DATA)
        if micro is None:
            return
        yield micro
        times.note(step_report.OTHER)
        if micro.last:
            times.ended()


def _wrap(owner: Any, name: str, times: StepTimes, part: str, before: str = step_report.OTHER) -> None:
    """The call belongs to `part`; the time since the last note, to `before`."""
    call = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        times.note(before)
        result = call(*arguments)
        times.note(part)
        return result

    setattr(owner, name, timed)
