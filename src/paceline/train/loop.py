"""The training loop.

for each micro-batch:
    forward and backward                              Stepper.add
    after the last one of a step: update parameters   Updater.apply
        keep the loss on its device                   Recorder.pending    (no synchronization)
        log, evaluate, save or profile if due         Agenda.run_due

It is written for few Python calls: between two log points a step makes about a dozen more than a hand-written loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from paceline.data.loader import MicroBatch
from paceline.sync.local_steps import LocalSteps
from paceline.train.agenda import Agenda
from paceline.train.callbacks import Step
from paceline.train.engine import Engine
from paceline.train.recorder import Recorder


@dataclass
class Job:
    """The parts of one `train()` call."""

    micros: Callable[
        [], Iterator[MicroBatch]
    ]  # called inside the loop, so that its errors are reported as training errors
    engine: Engine
    recorder: Recorder
    agenda: Agenda
    on_step: Sequence[Callable[[Step], Any]]


def run(job: Job) -> None:
    """Train until the data ends or the agenda stops."""
    with job.engine.position.reading(), job.engine.graphed or nullcontext():
        _run(job)


def _run(job: Job) -> None:
    stepper = job.engine.graphed or job.engine.stepper
    position, telemetry = job.engine.position, job.engine.telemetry
    recorder, agenda = job.recorder, job.agenda
    telemetry.begins(position.step)
    micros = job.micros()
    due = agenda.next_due(position.step)
    running = agenda.begin(position.step, position.epoch)
    job.engine.after_user_code()
    since = perf_counter()
    for micro in micros if running else ():
        recorder.waited += perf_counter() - since
        if micro.epoch != position.epoch:
            if not agenda.epoch_ended(position.step, position.epoch):
                break
            job.engine.after_user_code()
            position.epoch = micro.epoch
        stepper.add(micro)
        if micro.last:
            take_step(job, micro)
            if position.step == due:
                running = agenda.run_due(position.step, micro.epoch)
                job.engine.after_user_code()
                telemetry.stepped(position.step)
                if not running:
                    break
                due = agenda.next_due(position.step)
        since = perf_counter()
    agenda.finish(position.step, position.epoch)
    telemetry.finished(position.step)


def take_step(job: Job, micro: MicroBatch) -> None:
    """Update the parameters after `micro`, the last micro-batch of its step."""
    engine = job.engine
    stepper, updater = engine.stepper, engine.updater
    if engine.graphed is not None:
        norm = engine.graphed.take()
    else:
        if stepper.watch is not None:
            stepper.watch.check_losses(stepper.losses)
        factor = stepper.factor() if stepper.data_weighted else stepper.constant_factor
        norm = updater.apply(micro.step, factor)
    engine.position.step = job.recorder.display.completed = step = micro.step + 1
    engine.telemetry.heartbeat.at(step)
    if job.recorder.own_time is not None:
        job.recorder.own_time.stepped(job.recorder.waited)
    lr, parts, samples = updater.lr, stepper.losses, micro.step_samples
    job.recorder.pending.append((step, micro.epoch, lr, samples, parts, stepper.means, norm, updater.skipped))
    if engine.local_steps is not None:
        _after_local_step(job, engine.local_steps)
    if stepper.metrics:
        job.recorder.log_metrics(stepper.metrics)
    if job.on_step:
        for hook in job.on_step:
            hook(Step(step, micro.epoch, lr, samples, norm, parts, stepper.means))
        engine.after_user_code()
    stepper.losses = []
    if stepper.data_weighted or stepper.metrics:
        stepper.reset()


def _after_local_step(job: Job, local_steps: LocalSteps) -> None:
    """After a round, all replicas have the same weights."""
    if local_steps.spread is not None:
        job.recorder.log("replica_spread", local_steps.spread)
        local_steps.spread = None
        if job.engine.replicas is not None:
            job.engine.replicas.after_round()
