"""The training loop, on one screen.

for each micro-batch, in the run's order:
    forward and backward                              Stepper.add
    when its step is full: update the weights         Updater.apply
        keep the loss where it is                     Recorder.pending    (no synchronisation)
        when something is due (log point, end of an
        epoch, evaluation, checkpoint): attend to it  Agenda.attend

It is written for few Python calls: between two log points a step costs a dozen over a hand-written loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from paceline.data.loader import MicroBatch
from paceline.monitor.progress_bar import Display
from paceline.train.agenda import Agenda
from paceline.train.callbacks import Step
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.optimizer_step import Updater
from paceline.train.recorder import Recorder
from paceline.train.step import Stepper
from paceline.train.telemetry import Telemetry


@dataclass
class Job:
    """What one call of `train()` runs."""

    micros: Callable[[], Iterator[MicroBatch]]  # called when training begins, so that its errors are training's
    stepper: Stepper
    updater: Updater
    recorder: Recorder
    agenda: Agenda
    position: TrainProgress
    display: Display
    on_step: Sequence[Callable[[Step], Any]]
    telemetry: Telemetry


def run(job: Job) -> None:
    """Until the data ends or the agenda says so."""
    stepper, recorder, position, agenda = job.stepper, job.recorder, job.position, job.agenda
    due = agenda.next_due(position.step)
    job.telemetry.begins(position.step)
    micros = job.micros()
    goes_on = agenda.begin(position.step, position.epoch)
    since = perf_counter()
    for micro in micros if goes_on else ():
        recorder.waited += perf_counter() - since
        if micro.epoch != position.epoch:
            if not agenda.epoch_ended(position.step, position.epoch):
                break
            position.epoch = micro.epoch
        stepper.add(micro)
        if micro.last:
            take_step(job, micro)
            if position.step == due:
                goes_on = agenda.attend(position.step, micro.epoch)
                job.telemetry.stepped(position.step)
                if not goes_on:
                    break
                due = agenda.next_due(position.step)
        since = perf_counter()
    agenda.finish(position.step, position.epoch)
    job.telemetry.finished(position.step)


def take_step(job: Job, micro: MicroBatch) -> None:
    """The update for the micro-batches that were added, of which `micro` is the last."""
    stepper, updater = job.stepper, job.updater
    norm = updater.apply(micro.step, stepper.factor() if stepper.by_data else None)
    job.position.step = job.display.completed = step = micro.step + 1
    job.telemetry.heartbeat.at(step)
    lr, parts, samples = updater.lr, stepper.noted, micro.step_samples
    job.recorder.pending.append((step, micro.epoch, lr, samples, parts, stepper.means, norm, updater.skipped))
    if stepper.metrics:
        job.recorder.log_metrics(stepper.metrics)
    for hook in job.on_step:
        hook(Step(step, micro.epoch, lr, samples, norm, parts, stepper.means))
    stepper.noted = []
    if stepper.by_data or stepper.metrics:
        stepper.reset()
