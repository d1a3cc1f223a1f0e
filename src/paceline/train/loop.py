"""The training loop, on one screen.

for each micro-batch, in the run's order:
    forward and backward                       Stepper.add
    when its step is full:
        set the learning rate, update          Stepper.update
        note the loss                          Recorder.step      (no synchronisation)
        at a log point: reduce and write       Recorder.flush     (one collective)
        when due: evaluate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from paceline.data.loader import Micro
from paceline.optim.schedule import Schedule
from paceline.train.recorder import Recorder
from paceline.train.step import Stepper


@dataclass
class Job:
    """What one call of `train()` runs."""

    micros: Iterator[Micro]
    stepper: Stepper
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None  # None leaves the optimizer's learning rate alone
    recorder: Recorder
    evaluate: Callable[[], float] | None
    max_steps: int | None
    log_every: int
    eval_every: int | None  # None: whenever an epoch ends
    on_step: Callable[[int, int], None]  # told the steps done and the epoch, after each step


def run(job: Job) -> None:
    step, epoch, evaluated = 0, None, 0
    for micro in job.micros:
        if job.eval_every is None and epoch not in (None, micro.epoch):  # an epoch whose length nobody knew has ended
            evaluated = _evaluate(job, step, epoch)
        epoch = micro.epoch
        job.stepper.add(micro)
        if not micro.last:
            continue
        lr = _set_lr(job, micro.step)
        finished = job.stepper.update()
        step = micro.step + 1
        job.on_step(step, micro.epoch)
        job.recorder.step(finished, {"step": step, "epoch": micro.epoch, "lr": lr}, micro.step_samples)
        if step % job.log_every == 0:
            job.recorder.flush()
        if job.eval_every and step % job.eval_every == 0:
            evaluated = _evaluate(job, step, micro.epoch)
        if step == job.max_steps:
            break
    job.recorder.flush()
    if epoch is not None and evaluated != step:
        _evaluate(job, step, epoch)


def _set_lr(job: Job, step: int) -> float:
    groups = job.optimizer.param_groups
    if job.schedule is not None:
        factor = job.schedule.factor(step)
        for group in groups:
            group["lr"] = group["initial_lr"] * factor
    return float(groups[0]["lr"])


def _evaluate(job: Job, step: int, epoch: int | None) -> int:
    job.recorder.flush()
    if job.evaluate is not None:
        job.recorder.evaluation({"step": step, "epoch": epoch, "loss": job.evaluate()})
    return step
